"""Code that measurements share: stacks, links, timings and reports."""
