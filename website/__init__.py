"""What builds the site from the pages in ``docs/``: the pictures, and the pages made from the code."""
