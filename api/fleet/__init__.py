"""Workers: listed, invited, drained, banned."""
