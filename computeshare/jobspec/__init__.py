"""What a user asks for, checked completely: the JobSpec, its strategies' fields, names, sizes and limits."""
