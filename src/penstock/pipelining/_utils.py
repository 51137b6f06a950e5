"""Where stages are, under torch's names."""

from penstock.pipelining.orders import rank_to_stages as generate_rank_to_stage_mapping
from penstock.pipelining.orders import stage_to_rank as generate_stage_to_rank_mapping

__all__ = ["generate_rank_to_stage_mapping", "generate_stage_to_rank_mapping"]
