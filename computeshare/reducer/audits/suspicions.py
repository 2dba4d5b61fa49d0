"""Has updates that are unlike the others of their round computed again by another machine, before they count."""

from collections import Counter
from collections.abc import Iterable, Mapping, Set
from itertools import islice
from typing import Literal

import numpy as np
import structlog

from computeshare.protocol.reducer_session import ReducerSession
from computeshare.protocol.refusal import AuditRecords, Received
from computeshare.protocol.round_store import RoundState
from computeshare.reducer.audits.outliers import suspected_in
from computeshare.reducer.gather import Gatherer, Refused, RoundUpdates
from computeshare.strategies.averages import Mean, products, stacked
from computeshare.types import Token, machine_of

Outcome = Literal["asked", "confirmed", "alone", "late"]
log = structlog.get_logger()

VAIN = 0.02
"""Share of a machine's units that are computed again though they were right; those of one round more are allowed."""
LATE = 3
"""Units of a machine whose copy never came, after which a round does not wait for copies of its units any more."""
RENEWED_MS = 30_000
"""Time left of a suspicion at which it is renewed while the job is paused."""


class Suspicions:
    """Asks another machine of the same kind for a copy of each update that is far longer than the others of its round,
    or points away from them. `Audits` compares both: a wrong update is replaced before the round is committed.

    In a round, less than half of the units are asked for. Of a machine whose updates were right, at most 2 % and those
    of one round more are; none once three copies never came, or if no other machine of its kind is there. What is not
    asked for counts as `combine` has it.
    """

    def __init__(self, session: ReducerSession, gatherer: Gatherer) -> None:
        self._session, self._gatherer = session, gatherer
        self._token: Token | None = None
        self._asked, self._spared = set[int](), set[int]()
        """Units of the round that starts from `_token`: asked for; not to be asked for any more."""
        self._is_counted = False
        self._units, self._vain, self._late = Counter[str](), Counter[str](), Counter[str]()
        """Of each machine: units in all rounds; those that were right though asked for; those whose copy never came."""
        self._told = set[str]()
        """Machines of which an event says that their updates cannot be computed again."""

    def check(self, base: RoundState, parts: Mapping[int, Received], records: AuditRecords, settled: Set[int]) -> None:
        """Ask for copies of suspected updates. Raises Refused: copies are to be waited for, or updates were invalid.

        Args:
            settled: units for which two machines sent the same.
        """
        self._begin(base.token)
        open_ = [unit for unit, one in records.disputes.items() if one.copied and unit in parts]
        waiting = [self._waits(base, parts[unit], records) for unit in open_ if unit not in records.copies]
        if any(waiting):
            raise Refused
        if (most := (len(parts) - 1) // 2 - len(self._asked)) > 0:
            unlike = (unit for unit in self._unlike(base, parts) if unit not in settled | self._spared)
            asked = (unit for unit in unlike if self._ask(base, parts[unit], records))
            if [*islice(asked, most)]:
                raise Refused
        if not self._is_counted:
            self._units.update(machine_of(part.worker) for part in parts.values())
            self._is_counted = True

    def clear(self, base: RoundState, part: Received) -> None:
        """Note that another machine has sent the same as the suspected `part`."""
        self._begin(base.token)
        self._vain[machine_of(part.worker)] += 1
        self._tell(base, part, "confirmed")

    def _begin(self, token: Token) -> None:
        if token != self._token:
            self._token, self._asked, self._spared, self._is_counted = token, set(), set(), False

    def _waits(self, base: RoundState, part: Received, records: AuditRecords) -> bool:
        """Whether a suspected update waits for its copy."""
        left_ms = records.disputes[part.micro_batch].left_ms
        if base.status != "running":  # nobody computes
            return left_ms > RENEWED_MS or self._suspect(base, part)
        others = self._others(part, records)
        if left_ms > 0 and others:
            return True
        self._session.close_audit(base.token, part)
        self._spared.add(part.micro_batch)
        self._late[machine_of(part.worker)] += bool(others)
        self._tell(base, part, "late" if others else "alone")
        return False

    def _unlike(self, base: RoundState, parts: Mapping[int, Received]) -> Iterable[int]:
        """The units whose updates are unlike the others. Raises Refused: some updates were invalid."""
        updates = RoundUpdates(self._gatherer, base, dict(parts), lambda: Mean(1))
        total = np.zeros((len(parts), len(parts)))
        try:
            for bucket in range(len(self._gatherer.layout.buckets)):
                total += products(stacked(updates.read(bucket), len(parts)))
        finally:
            self._gatherer.settle()
        units = sorted(parts)
        return [units[row] for row in suspected_in(total)]

    def _ask(self, base: RoundState, part: Received, records: AuditRecords) -> bool:
        """Ask for a copy of a suspected update, unless it is of no use or too often in vain; whether it was."""
        machine = machine_of(part.worker)
        self._spared.add(part.micro_batch)
        if self._vain[machine] > VAIN * self._units[machine] or self._late[machine] >= LATE:
            return False
        if not self._others(part, records) and base.status == "running":
            if machine not in self._told:
                self._tell(base, part, "alone")
            self._told.add(machine)
            return False
        if not self._suspect(base, part):
            return False
        self._asked.add(part.micro_batch)
        self._tell(base, part, "asked")
        return True

    def _others(self, part: Received, records: AuditRecords) -> set[str]:
        """The machines in the job of the same kind as the one that made `part`, without that."""
        kinds = records.kinds
        alike = {machine_of(one) for one in records.present if kinds.get(one) == kinds.get(part.worker)}
        return alike - {machine_of(part.worker)}

    def _suspect(self, base: RoundState, part: Received) -> bool:
        digest = self._gatherer.digest((part.base, part.micro_batch))
        return digest is not None and self._session.suspect(base.token, part, digest)

    def _tell(self, base: RoundState, part: Received, outcome: Outcome) -> None:
        about = {"version": base.version, "micro_batch": part.micro_batch, "worker": part.worker, "outcome": outcome}
        self._session.announce("suspected", about)
        tell = log.info if outcome == "confirmed" else log.warning
        tell("suspected an update", job=self._session.job_id, **about)
