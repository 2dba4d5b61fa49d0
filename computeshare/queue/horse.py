"""`python -m computeshare.queue.horse`: the process of one seat."""

from computeshare.queue.rq_worker import run_horse

if __name__ == "__main__":
    run_horse()
