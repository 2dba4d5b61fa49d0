"""A JobSpec as people read and write it: its fields, requests that create it, differences between several."""
