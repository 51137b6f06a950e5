"""Random programs, each run as a plain loop and as a Pipeline; see docs/campaigns.md."""
