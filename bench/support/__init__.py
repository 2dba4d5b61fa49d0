"""What measurements share: stacks, links, timings and reports."""
