"""What a user asks for, checked completely: the JobSpec, its fields, names, sizes and limits."""
