"""How commands end, and how values look in a terminal."""
