"""`python -m computeshare.queue.horse`: the process of one seat."""

from computeshare.processes import exit_with_parent

if __name__ == "__main__":
    exit_with_parent()  # before anything that takes time

    from computeshare.queue.rq_worker import run_horse

    run_horse()
