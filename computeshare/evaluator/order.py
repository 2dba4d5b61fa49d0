"""In which order checkpoints are scored, and which of them is the best. Pure."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from computeshare.jobspec.tasks.facts import goodness
from computeshare.types import Token

Due = tuple[str, Token]
"""A job's id and the token of one of its checkpoints."""


def in_turn(
    waiting: Mapping[str, Collection[Token]],
    last: Mapping[str, int],
    served: Mapping[str, int],
    oldest_first: Collection[str] = (),
) -> Iterator[Due]:
    """The order in which to score checkpoints.

    Jobs whose next checkpoint is their last version come first, then the jobs served longest ago. In each pass over the
    jobs, each job gets one checkpoint scored: the newest, or the oldest where early stopping needs the scores in order.

    Args:
        waiting: checkpoints without a score, by job.
        last: the number of each job's last version.
        served: a number for each job that grows with the time it was last served; jobs never served are missing.
        oldest_first: the jobs whose oldest checkpoint comes first.
    """
    queues = {
        job: sorted(tokens, key=_newness, reverse=job not in oldest_first) for job, tokens in waiting.items() if tokens
    }

    def urgency(job: str) -> tuple[bool, int]:
        return queues[job][0].version < last[job], served.get(job, -1)

    jobs = sorted(queues, key=urgency)
    for turn in range(max(map(len, queues.values()), default=0)):
        for job in jobs:
            if turn < len(queues[job]):
                yield job, queues[job][turn]


def _newness(token: Token) -> tuple[int, int]:
    return token.version, token.incarnation


def best_of(scores: Mapping[Token, Mapping[str, Any]]) -> Token:
    """The checkpoint with the best score; of equally good ones the earliest."""
    return max(scores, key=lambda token: (goodness(scores[token]), -token.version))
