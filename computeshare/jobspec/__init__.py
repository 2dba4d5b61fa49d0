"""The JobSpec, the specification of a job: its fields, names, sizes and limits."""
