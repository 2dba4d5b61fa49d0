"""Jobs over REST: created, listed, forked, compared, and what was recorded of them."""
