"""Updates that several machines computed: which are asked for, how they are compared, and what follows."""
