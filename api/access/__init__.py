"""Who may do what: tokens with scopes, read-only links to jobs, and the audit log."""
