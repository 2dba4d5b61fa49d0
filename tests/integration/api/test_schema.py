"""Every route of the schema, called with what its schema allows and with what it does not: answered as documented.

COMPUTESHARE_CALLS says how many calls at least (200), COMPUTESHARE_SEED which ones (others for each commit).
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from computeshare.jobspec.spec import JobSpec
from computeshare.settings import Settings
from tests.support import sample
from tests.support.served_api import serving

CALLS, SEED = int(os.environ.get("COMPUTESHARE_CALLS", "200")), sample.seed()
AT_ONCE = 25 if CALLS > 200 else 8
"""The most calls of a route in one mode before the other routes' turn."""
CONFORMING = (status_code_conformance, content_type_conformance, response_schema_conformance)
TOKEN = {"Authorization": "Bearer secret"}


class Caller:
    """Calls one operation with generated requests and checks each answer."""

    def __init__(self, url: str, app: Any, operation: Any) -> None:
        self.url, self.jobs, self.operation = url, app.state.services.jobs, operation
        self.calls = 0

    def job(self) -> str:
        """A job that such a call may meet: one that ended for streams, which are endless otherwise."""
        made: str = self.jobs.create(JobSpec(dataset="digits", model="mlp", rounds=3)).id
        if self.calls % 2 or self.operation.path.endswith(("/events", "/stream")):
            self.jobs.cancel(made)
        return made

    def check(self, case: Case) -> None:
        if "job_id" in case.path_parameters and self.calls % 3:
            case.path_parameters["job_id"] = self.job()
        self.calls += 1
        answer = case.call(base_url=self.url, headers=TOKEN, allow_redirects=False, timeout=20)
        ready = (self.operation.path, answer.status_code) == ("/readyz", 503)
        case.validate_response(answer, checks=[*CONFORMING, *([] if ready else [not_a_server_error])])
        kind = answer.headers.get("content-type", [""])[0]
        assert answer.status_code < 400 or ready or kind.startswith(("application/problem+json", "text/html")), kind


def fuzz(check: Callable[[Case], None], operation: Any, mode: GenerationMode, calls: int, seed: int) -> None:
    """Make at most that many different calls in one mode."""

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=calls, deadline=None, database=None, suppress_health_check=list(HealthCheck), derandomize=False
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def run(case: Case) -> None:
        check(case)

    run()


@pytest.fixture
def served(settings: Settings) -> Iterator[tuple[str, Any]]:
    with serving(settings) as found:
        yield found


@pytest.mark.timeout(0 if CALLS > 200 else 300)
@pytest.mark.slow
def test_every_route_answers_every_request_as_documented(served: tuple[str, Any]) -> None:
    url, app = served
    operations = [found.ok() for found in schemathesis.openapi.from_dict(app.openapi()).get_all_operations()]
    assert len(operations) > 20
    callers, seed = [Caller(url, app, operation) for operation in operations], SEED * 1_000_000
    while (calls := sum(caller.calls for caller in callers)) < CALLS:
        for caller in callers:
            for mode in GenerationMode:
                takes_something = list(caller.operation.iter_parameters()) or caller.operation.body
                if mode is GenerationMode.POSITIVE or takes_something:
                    fuzz(caller.check, caller.operation, mode, AT_ONCE, seed)
        seed += 1
    print(f"{calls} calls, seed {SEED}, no 5xx")
