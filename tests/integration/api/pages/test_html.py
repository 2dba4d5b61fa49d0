"""The pages as the server writes them: a real database, no browser."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update
from starlette.testclient import TestClient

from api.database import now_ms
from api.jobs.history import EVENTS_ON_PAGE
from api.main import create_app
from api.pages.views import PER_PAGE
from api.recipes.schemas import RecipeRequest
from api.tables import Event, Exchange, Job, Score, Submission, VersionRow, WorkerStat
from computeshare.jobspec.spec import JobSpec
from computeshare.queue import WorkerInfo, register, unregister
from computeshare.settings import Settings
from tests.support.html import HOSTILE, assert_allowed_by_policy
from tests.support.recipe_jobs import FACTS


class Pages:
    """Asks for pages as a browser that is logged in."""

    def __init__(self, settings: Settings) -> None:
        app = create_app(settings)
        self.services = app.state.services
        self.services.database.migrate()
        headers = {"authorization": f"Bearer {self.services.token}", "accept": "text/html"}
        self.client = TestClient(app, base_url="http://127.0.0.1", headers=headers)

    @property
    def redis(self) -> Any:
        return self.services.broker.client()

    def get(self, path: str, status: int = 200) -> str:
        answer = self.client.get(path)
        assert answer.status_code == status, answer.text
        assert answer.headers["content-type"].startswith("text/html")
        assert_allowed_by_policy(answer.text)
        return str(answer.text)

    def create(self, status: str = "queued", **spec: Any) -> str:
        """A job in that state, without waiting for anyone to bring it there."""
        spec = {"dataset": "digits", "model": "mlp", "rounds": 10} | spec
        job_id = str(self.services.jobs.create(JobSpec.model_validate(spec)).id)
        self.change(job_id, status=status)
        return job_id

    def change(self, job_id: str, **values: Any) -> None:
        with self.services.database.writing() as connection:
            connection.execute(update(Job.__table__).where(Job.__table__.c.id == job_id).values(**values))  # type: ignore[attr-defined]


@pytest.fixture
def pages(database_file: Path, redis_url: str) -> Iterator[Pages]:
    one = Pages(Settings(home=database_file.parent, redis_url=f"{redis_url}?db=7"))  # no other test's workers
    yield one
    one.services.broker.close()
    one.services.database.close()


def listed(html: str) -> list[str]:
    return re.findall(r'id="job-(\w+)"', html)


def test_without_jobs_the_page_teaches_how_to_make_one(pages: Pages) -> None:
    assert "computeshare jobs create" in pages.get("/")


def test_running_jobs_come_first_then_the_newest(pages: Pages) -> None:
    running, completed, queued = (pages.create(status) for status in ("running", "completed", "queued"))
    assert listed(pages.get("/")) == [running, queued, completed]


def test_the_filter_shows_one_status_and_says_how_many_there_are(pages: Pages) -> None:
    wanted = pages.create("failed")
    pages.create("queued")
    html = pages.get("/?status=failed")
    assert listed(html) == [wanted]
    assert re.search(r'href="/\?status=failed" aria-current="true">Failed <span>1</span>', html)
    assert "No paused jobs." in pages.get("/?status=paused")


def test_the_list_can_be_of_one_queue(pages: Pages) -> None:
    lab, other = pages.create("running", queue="lab"), pages.create("failed", queue="other")
    assert listed(pages.get("/")) == [lab, other]
    html = pages.get("/?queue=lab")
    assert listed(html) == [lab] and "Queue: lab." in html and "Failed <span>" not in html
    assert 'href="/?status=running&amp;queue=lab"' in html
    assert "No jobs on queue nowhere" in pages.get("/?queue=nowhere")


def test_what_goes_wrong_is_a_page_for_a_browser_and_a_problem_for_a_program(pages: Pages) -> None:
    html = pages.get("/nothing/here", 404).partition("<main")[2]
    assert "<h1>Page not found</h1>" in html and "There is no page /nothing/here." in html and "Not Found" not in html
    assert "job" in pages.get("/compare?" + "job=x&" * 60, 422)
    for path, accept in (("/nothing/here", "*/*"), ("/v1/jobs/nosuch00", "text/html")):
        told = pages.client.get(path, headers={"accept": accept})
        assert (told.status_code, told.headers["content-type"]) == (404, "application/problem+json")


def test_the_timeline_is_paged_and_holds_every_version(pages: Pages) -> None:
    job_id, now = pages.create("running"), now_ms()
    assert f'href="/jobs/{job_id}/timeline"' in pages.get(f"/jobs/{job_id}")
    with pages.services.database.write() as session:
        for version in range(1, EVENTS_ON_PAGE + 11):
            session.add(Event(job_id=job_id, type="version", at_ms=now, data={"version": version, "loss": 0.5}))
    assert "committed" not in pages.get(f"/jobs/{job_id}")
    first = pages.get(f"/jobs/{job_id}/timeline")
    assert first.count("committed") == EVENTS_ON_PAGE and f"Version {EVENTS_ON_PAGE + 10} committed, loss 0.5" in first
    older = re.search(r'id="older" href="([^"]+)"', first)
    assert older
    rest = pages.get(older[1])
    assert rest.count("committed") == 10 and "Created" in rest and 'id="older"' not in rest
    pages.get(f"/jobs/{job_id}/timeline?cursor=nonsense", 404)
    pages.get("/jobs/nosuch00/timeline", 404)


def test_the_lowest_loss_is_that_of_all_versions(pages: Pages) -> None:
    """Also where the plots leave out most of them."""
    job_id, other = pages.create("running"), pages.create("completed")
    pages.change(job_id, version=3000)
    with pages.services.database.write() as session:
        for version in range(1, 3001):
            about = {"job_id": job_id, "token": f"1.{version}.a", "incarnation": 1, "version": version}
            loss = {1000: None, 1001: 0.0, 1002: -1.0}.get(version, 0.5)
            session.add(Score(**about, at_ms=version, loss=loss, accuracy=0.5, samples=1, voided=version == 1002))
    assert "lowest test loss 0 at version 1,001" in pages.get(f"/jobs/{job_id}")
    assert pages.client.get(f"/jobs/{job_id}/data").json()["lowest"] == {"version": 1001, "value": 0.0}
    assert re.search(r"Lowest test loss.*?<td>0</td>", pages.get(f"/compare?job={job_id}&job={other}"), re.DOTALL)


def test_rest_tells_what_the_page_of_compared_jobs_shows(pages: Pages) -> None:
    spec = {"optimizer": {"name": "SGD", "lr": 0.125, "momentum": 0.9}, "queue": "b"}
    one, other = pages.create("completed", name="a"), pages.create("running", name="b", **spec)
    began = now_ms() - 90_000
    counts = {"accepted": 9, "stale": 1, "duplicate": 2, "lease_lost": 3, "fenced": 4, "refused": 5}
    pages.change(other, **counts, bytes_up=10, bytes_down=20, started_ms=began, finished_ms=began + 60_000)
    with pages.services.database.write() as session:
        for version, loss in ((1, 0.5), (2, 0.25), (3, 0.75)):
            about = {"job_id": other, "token": f"1.{version}.aa", "incarnation": 1, "version": version}
            session.add(Score(**about, at_ms=version, loss=loss, accuracy=0.5, samples=1, voided=False))
    found = pages.client.get("/v1/compare", params={"job": [other, one]}).json()
    assert found["differences"] == {"queue": ["b", "default"], "optimizer.lr": [0.125, 0.05]}
    first, second = found["items"]
    assert (first["id"], first["title"], first["status"], second["id"]) == (other, "b", "running", one)
    assert (first["accepted"], first["dropped"], first["bytes_up"], first["bytes_down"]) == (9, 15, 10, 20)
    assert (first["lowest_test_loss"], first["seconds"]) == (0.25, 60.0)
    assert (second["lowest_test_loss"], second["seconds"]) == (None, None)
    assert "15 of 24" in pages.get(f"/compare?job={one}&job={other}")


@pytest.mark.parametrize("count", [0, 1, 7])
def test_rest_compares_two_to_six_jobs(pages: Pages, count: int) -> None:
    made = [pages.create("completed") for _ in range(count)]
    assert pages.client.get("/v1/compare", params={"job": made}).status_code == 422


def test_rest_compares_no_job_with_itself_and_none_that_is_not_there(pages: Pages) -> None:
    job_id = pages.create("completed")
    twice = pages.client.get("/v1/compare", params={"job": [job_id, job_id]})
    assert twice.status_code == 422 and "name each job once" in twice.text
    assert pages.client.get("/v1/compare", params={"job": [job_id, "nosuch00"]}).status_code == 404


def test_an_unknown_status_names_those_there_are(pages: Pages) -> None:
    html = pages.get("/?status=asleep", 404)
    assert "completed" in html


def test_older_jobs_are_a_link_away(pages: Pages) -> None:
    running = pages.create("running")
    others = [pages.create("completed") for _ in range(PER_PAGE + 2)]
    first = pages.get("/")
    older = re.search(r'id="older" href="([^"]+)"', first)
    assert older
    assert listed(first) == [running, *reversed(others[2:])]
    assert listed(pages.get(older[1].replace("&amp;", "&"))) == [others[1], others[0]]
    pages.get("/?cursor=nonsense", 404)


def test_a_missing_job_gets_a_readable_page(pages: Pages) -> None:
    assert "There is no job nosuch00" in pages.get("/jobs/nosuch00", 404)
    for part in ("parts", "submissions", "timeline"):
        pages.get(f"/jobs/nosuch00/{part}", 404)
    assert "&lt;script&gt;" in pages.get("/jobs/%3Cscript%3E", 404)
    html = pages.get("/jobs/a:b", 404)
    assert "There is no job a:b" in html and "It may have been deleted." in html
    html = pages.get(f"/jobs/{pages.create('running')}/classes", 404)
    assert "has no best version yet, because no version has been scored" in html and "Use latest." in html


def test_a_new_job_says_how_to_give_it_a_worker(pages: Pages) -> None:
    job_id = pages.create(queue="lab")
    pages.change(job_id, reason="Needs 1 worker on queue lab, 0 are online", reason_code="workers", missing_workers=1)
    html = pages.get(f"/jobs/{job_id}")
    assert "Needs 1 worker on queue lab, 0 are online" in html
    assert "computeshare-worker --queue lab" in html


@pytest.mark.parametrize(
    ("error", "primary"), [("no space left on device", "retry"), ("Diverged at version 3", "clone")]
)
def test_a_failed_job_offers_first_what_helps_and_the_rest_in_its_menu(pages: Pages, error: str, primary: str) -> None:
    job_id = pages.create("failed")
    pages.change(job_id, error=error)
    actions, menu = pages.get(f"/jobs/{job_id}/parts").partition('<div id="state"')[0].split('id="menu-actions"')
    rest = ({"retry", "clone"} - {primary}).pop()
    assert f'id="{primary}"' in actions and f'id="{rest}"' not in actions
    assert f'id="{rest}"' in menu and f'id="{primary}"' not in menu


@pytest.mark.parametrize(
    ("status", "verbs"),
    [
        ("queued", {"pause", "share", "rename", "edit", "cancel"}),
        ("running", {"pause", "share", "rename", "edit", "cancel"}),
        ("paused", {"resume", "share", "rename", "edit", "cancel"}),
        ("failed", {"retry", "share", "rename", "edit", "delete"}),
        ("completed", {"share", "rename", "edit", "delete"}),
        ("cancelled", {"share", "rename", "edit", "delete"}),
    ],
)
def test_a_job_offers_what_can_be_done_in_its_state(pages: Pages, status: str, verbs: set[str]) -> None:
    job_id = pages.create(status)
    actions = pages.get(f"/jobs/{job_id}/parts").partition('id="actions"')[2].partition('<div id="state"')[0]
    assert set(re.findall(rf"computeshare jobs (\w+) {job_id}", actions)) == verbs
    assert set(re.findall(r'data-verb="(\w+)', actions)) == verbs & {"pause", "resume", "retry"}
    assert {name for name in ("rename", "delete") if f'data-{name}="{job_id}"' in actions} == verbs & {
        "rename",
        "delete",
    }
    assert ('id="cancel"' in actions) == ("cancel" in verbs) and f'href="/new?from={job_id}"' in actions


def test_a_paused_job_says_since_when_and_by_whom(pages: Pages) -> None:
    job_id = pages.create("running")
    pages.services.jobs.pause(job_id)
    state = pages.get(f"/jobs/{job_id}").split('id="state"')[1].split("<section")[0]
    assert re.search(r'state-paused"><svg.*?</svg>Paused</span>', state)
    assert re.search(r"\b\d+ s ago", state) and "Paused by a user" in state


def test_an_error_is_split_into_plain_words_and_details(pages: Pages) -> None:
    job_id = pages.create("failed")
    pages.change(job_id, error="diverged at version 3\n\nTraceback: line 1", finished_ms=now_ms())
    html = pages.get(f"/jobs/{job_id}")
    assert html.index("diverged at version 3") < html.index("Traceback: line 1") < html.index("Progress</h2>")
    assert "computeshare jobs cancel" not in html


def test_workers_that_left_stay_greyed(pages: Pages) -> None:
    job_id, now = pages.create("running"), now_ms()
    about = {"job_id": job_id, "device": "cpu", "joined_ms": now, "seen_ms": now}
    with pages.services.database.write() as session:
        session.add(WorkerStat(worker="here0001", name="here", samples=300, accepted=3, **about))
        session.add(WorkerStat(worker="gone0001", name="gone", samples=100, left_ms=now, left_reason="slept", **about))
    table = pages.get(f"/jobs/{job_id}/parts").split('id="workers"')[1].split("</table>")[0]
    here, gone = table.split("<tr")[2:]
    assert 'class="gone"' not in here
    assert "75 %" in here
    assert 'class="gone"' in gone
    assert "slept" in gone


STAGES: dict[str, Any] = {
    "stages": [{"layers": ["tok", "blocks.0"], "parameters": 1200}, {"layers": ["blocks.1"], "parameters": 800}],
    "chains": [
        [{"worker": "w1", "first": 0, "stop": 1}, {"worker": "w2", "first": 1, "stop": 2}],
        [{"worker": "w3", "first": 0, "stop": 2}],
    ],
    "workers": {
        "w1": {"busy": 0.75, "memory_bytes": 600_000_000, "mail_bytes": 2_000_000},
        "w2": {"busy": 0.25, "memory_bytes": 500_000_000, "mail_bytes": 1_000_000},
    },
    "courses": {"0": {"every": 2, "points": [0.5, 0.75], "sum": 0.0, "count": 0}},
}


def test_the_table_of_stages_says_who_holds_what_and_how_busy_each_was_over_time(pages: Pages) -> None:
    pipeline = {"strategy": {"kind": "pipeline"}, "accumulate": 4}
    job_id, now = pages.create("running", **pipeline), now_ms()
    with pages.services.database.write() as session:
        for worker in ("w1", "w2", "w3"):
            session.add(WorkerStat(worker=worker, name=f"mac {worker}", job_id=job_id, device="cpu", seen_ms=now))
    assert 'id="stages"' not in pages.get(f"/jobs/{job_id}"), "nobody has decided where the model is split"
    pages.change(job_id, stages=STAGES)
    html = pages.get(f"/jobs/{job_id}/parts").split('id="stages"')[1].split("</table>")[0]
    assert "Waiting for others takes 50 %" in html and "With equal stages it would be 20 %: the link is slow" in html
    first, second, both = html.split("<tr")[2:]
    for row, words in (
        (first, ("Stage 1", "chain 1", "mac w1", "tok to blocks.0", "1,200", "600 MB", "2.0 MB", "75 %")),
        (second, ("Stage 2", "mac w2", "blocks.1", "800", "500 MB", "25 %")),
        (both, ("Stages 1 to 2", "chain 2", "mac w3", "tok to blocks.1", "2,000", ">–<")),
    ):
        assert [word for word in words if word not in row] == []
    assert 'aria-label="Busy over time, from 50 % to 75 %"' in first
    assert 'd="M0.00 30V15.0h50.00V30ZM50.00 30V7.5h50.00V30Z"' in first
    assert "<svg" not in second, "one point is no course"
    told = pages.client.get(f"/v1/jobs/{job_id}/workers", headers={"accept": "application/json"}).json()
    assert [one["course"] for one in told["stages"]] == [[0.5, 0.75], [], [0.5, 0.75]] and told["bubble"] == 0.5
    pages.change(job_id, status="completed")
    html = pages.get(f"/jobs/{job_id}/parts").split('id="stages"')[1].split("</table>")[0]
    assert "Who held which layers" in html and "took 50 %" in html and "the link is slow" not in html
    assert "mac w2" in html, "so that the next job can be split better"


def test_a_job_of_peers_shows_how_far_they_are_apart_and_who_averaged_with_whom(pages: Pages) -> None:
    peers, plain, now = pages.create("running", strategy={"kind": "gossip"}), pages.create("running"), now_ms()
    with pages.services.database.write() as session:
        for job_id, consensus in ((peers, 0.25), (plain, None)):
            for worker in ("w1", "w2", "w3"):
                about = {"worker": worker, "name": f"mac {worker}", "device": "cpu", "joined_ms": now, "seen_ms": now}
                session.add(WorkerStat(job_id=job_id, left_ms=now if worker == "w3" else None, **about))
            of = {"job_id": job_id, "token": "1.1.aa", "incarnation": 1, "version": 1, "at_ms": now, "epoch": 0}
            spent = {"samples": 8, "samples_per_s": 1, "bytes_up": 1, "bytes_down": 1}
            session.add(VersionRow(**of, **spent, loss=0.5, consensus=consensus))
        session.add(Exchange(job_id=peers, worker="w1", peer="w2", count=1400, distance=0.125))
        session.add(Exchange(job_id=peers, worker="w3", peer="w1", count=7, distance=None))
    for job_id in (peers, plain):
        pages.change(job_id, version=1)
    html = pages.get(f"/jobs/{peers}")
    assert 'data-plot="consensus"' in html and "Consensus distance</h2>" in html
    assert 'data-plot="staleness"' not in html, "their weights count as they are"
    assert pages.client.get(f"/jobs/{peers}/data").json()["series"]["versions"]["consensus"] == [0.25]
    headings, first, second, gone = html.split('id="exchanges"')[1].split("</table>")[0].split("<tr")[1:]
    assert re.findall(r"with (mac \w+)", headings) == ["mac w1", "mac w2", "mac w3"]
    assert re.findall(r"<td.*?</td>", first) == [
        '<td class="number">–</td>',
        '<td class="number heat-4">1,400 <span class="small muted">0.125</span></td>',
        '<td class="number">–</td>',
    ]
    assert re.findall(r"<td.*?</td>", second) == ['<td class="number">–</td>'] * 3, "it has read nobody's yet"
    assert 'class="gone"' in gone and re.findall(r"<td.*?</td>", gone)[0] == '<td class="number heat-1">7</td>'

    told = pages.client.get(f"/v1/jobs/{peers}/workers", headers={"accept": "application/json"}).json()["exchanges"]
    assert [(one["worker"], one["peer"], one["count"], one["distance"]) for one in told] == [
        ("w1", "w2", 1400, 0.125),
        ("w3", "w1", 7, None),
    ]
    html = pages.get(f"/jobs/{plain}")
    assert 'data-plot="loss"' in html and "mac w1" in html
    assert not re.search('data-plot="consensus"|Consensus|Exchanges|id="exchanges"', html)


def test_one_more_worker_is_told_with_what_is_left_now_and_then(pages: Pages) -> None:
    """Two workers take 1 s and 3 s for a unit. A round has 6 units: 5 and 1 of them take 5 s, and the round takes 10 s.

    A third worker that takes 2 s for a unit brings the 5 s down to 4: 10 / 9 as fast. If it takes 3 s, the other 5 s
    are half as long again in the worst case: 10 / 11.5. If it takes 1 s, the units take 3 s: 10 / 8.
    """
    job_id, now = pages.create("running", rounds=1000, micro_batch=10, micro_batches_per_round=6), now_ms()
    assert "Too early to estimate" in pages.get(f"/jobs/{job_id}")
    base = {"job_id": job_id, "samples": 60, "bytes_up": 1, "bytes_down": 1}
    seconds = {"waiting_s": 50.0, "encoding_s": 0.25, "uploading_s": 0.25}
    with pages.services.database.write() as session:
        for unit_s, worker in ((1, "w1"), (3, "w2")):
            times = {"joined_ms": now - 200_000, "seen_ms": now}
            session.add(WorkerStat(job_id=job_id, worker=worker, name=worker, device="cpu", **times))
            about = {"worker": worker, "nonce": worker, "stream_id": f"{unit_s}-0", "outcome": "accepted", "at_ms": now}
            session.add(Submission(**base, **seconds, **about, micro_batches=[1, 2], computing_s=2 * unit_s - 0.5))
        for version in range(1, 12):
            about = {"token": f"1.{version}.a", "incarnation": 1, "version": version, "epoch": 0}
            at_ms = now - 10_000 * (12 - version)
            session.add(VersionRow(**base, **about, samples_per_s=6.0, at_ms=at_ms))
    pages.change(job_id, version=11, samples_per_s=6.0)
    line = pages.get(f"/jobs/{job_id}/parts").split('id="estimate"')[1].split("</p>")[0]
    assert "about <b>1.11 times</b> as fast (0.87 to 1.25): 2 h 28 min left instead of 2 h 44 min" in line
    pages.change(job_id, samples_per_s=0.0)
    assert "left instead of" not in pages.get(f"/jobs/{job_id}/parts").split('id="estimate"')[1].split("</p>")[0]


def test_parts_hold_the_plots_table_only_when_asked(pages: Pages) -> None:
    job_id = pages.create("running")
    assert 'id="values-table"' not in pages.get(f"/jobs/{job_id}/parts")
    assert 'id="values-table"' in pages.get(f"/jobs/{job_id}/parts?table=true")


def test_the_address_that_readers_guess_leads_to_the_form(pages: Pages) -> None:
    answer = pages.client.get("/jobs/new?from=abc", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (308, "/new?from=abc")
    assert "New job</h1>" in pages.get("/jobs/new")


def test_names_are_escaped_everywhere(pages: Pages) -> None:
    job_id, now = pages.create("running", name=HOSTILE), now_ms()
    with pages.services.database.write() as session:
        times = {"joined_ms": now, "left_ms": now, "seen_ms": now}
        session.add(WorkerStat(job_id=job_id, worker="h1", name=HOSTILE, device=HOSTILE, left_reason=HOSTILE, **times))
    pages.change(job_id, reason=HOSTILE, error=HOSTILE)
    worker = WorkerInfo("hostile0", HOSTILE, HOSTILE, (HOSTILE,), {HOSTILE: HOSTILE}, 1, HOSTILE, 1, HOSTILE)
    register(pages.redis, worker)
    other = pages.create("running", name="other")
    paths = (f"/jobs/{job_id}/submissions", f"/compare?job={job_id}&job={other}", f"/new?from={job_id}")
    for path in ("/", f"/jobs/{job_id}", f"/jobs/{job_id}/parts", "/workers", *paths):
        html = pages.get(path)
        assert "alert(1)" in html
        assert "<script>alert" not in html
        assert "<b onclick" not in html
    unregister(pages.redis, worker.id)


def test_the_form_makes_a_job_once_and_shows_what_is_wrong(pages: Pages) -> None:
    assert "5 rounds of" not in pages.get("/new")
    wrong = pages.client.post("/new", data={"dataset": "digits", "model": "lenet5", "epochs": "1"})
    assert wrong.status_code == 422
    assert "needs an input of at least" in wrong.text
    filled = {"dataset": "digits", "model": "mlp", "rounds": "5", "name": "by hand", "key": "once"}
    checked = pages.client.post("/new/check", data=filled)
    assert "5 rounds of 128 samples" in checked.text and "computeshare jobs create" in checked.text
    made = [pages.client.post("/new", data=filled, follow_redirects=False) for _ in range(2)]
    assert [answer.status_code for answer in made] == [303, 303]
    assert made[0].headers["location"] == made[1].headers["location"]
    assert [job.name for job in pages.services.jobs.list().items] == ["by hand"]
    changed = pages.client.post("/new", data=filled | {"rounds": "6"}, follow_redirects=False)  # after going back
    assert changed.status_code == 303 and changed.headers["location"] != made[0].headers["location"]
    assert len(pages.services.jobs.list().items) == 2


def test_the_form_says_when_one_bad_machine_could_spoil_the_job(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    filled = {"dataset": "digits", "model": "mlp", "queue": "lab", "micro_batches_per_round": "3", "micro_batch": "479"}
    assert "can spoil this job" not in pages.client.post("/new/check", data=filled).text
    monkeypatch.setattr(pages.services.jobs, "_invited", lambda queue: queue == "lab")
    assert "can spoil this job" in pages.client.post("/new/check", data=filled).text
    assert "can spoil this job" not in pages.client.post("/new/check", data=filled | {"queue": "mine"}).text
    robust = filled | {"workers.min": "3", "more": '{"strategy": {"combine": "median"}}'}
    checked = pages.client.post("/new/check", data=robust).text
    assert "rounds of 1,437 samples" in checked and "can spoil this job" not in checked
    for name, queue, audit in (("open", "lab", 0.02), ("own", "mine", None)):
        made = pages.client.post("/new", data=filled | {"queue": queue, "key": name}, follow_redirects=False)
        assert pages.services.jobs.show(made.headers["location"].split("/")[-1]).spec["audit"] == audit


def test_a_form_with_something_wrong_in_a_closed_panel_comes_back_with_that_open(pages: Pages) -> None:
    assert '<details class="panel"><summary><h2>More' in pages.get("/new")
    filled = {"dataset": "digits", "model": "mlp", "rounds": "5"}
    hidden = pages.client.post("/new", data=filled | {"seed": "-1", "more": "[1]"}).text
    assert '<details class="panel" open><summary><h2>More' in hidden
    assert re.findall(r'id="([\w-]+)"[^>]* autofocus', hidden) == ["seed"]
    assert re.findall(r'id="to-([\w-]+)" href="#\1"', hidden) == ["seed", "more"]
    assert '<details class="panel"><summary><h2>More' in pages.client.post("/new", data=filled | {"rounds": "0"}).text


def test_a_clone_begins_with_what_the_job_had(pages: Pages) -> None:
    job_id = pages.create("completed", name="the first", rounds=77, optimizer={"name": "Adam", "lr": 0.125})
    html = pages.get(f"/new?from={job_id}")
    for value in ('value="the first"', 'value="77"', "<option selected>Adam</option>", 'value="0.125"'):
        assert value in html
    assert "There is no job nosuchid" in pages.get("/new?from=nosuchid", 404)


def test_compared_jobs_show_what_differs(pages: Pages) -> None:
    one, other = pages.create("completed", rounds=7), pages.create("completed", rounds=9)
    html = pages.get(f"/compare?job={one}&job={other}")
    assert "<code>rounds</code></th><td>7</td><td>9</td>" in html
    assert "<code>dataset</code>" not in html
    with pages.services.database.write() as session:
        about = {"job_id": other, "token": "1.1.a", "incarnation": 1, "version": 1, "voided": False}
        session.add(Score(**about, at_ms=1, loss=0.125, accuracy=0.75, samples=1))
    pages.change(other, version=1)
    tables = pages.get(f"/compare?job={one}&job={other}").split('id="values-tables"')[1].split("</details>")[0]
    assert tables.count("No versions yet.") == 1
    assert re.search(r'<th scope="row" class="number">1</th>.*>0.125</td>.*>75.00 %</td>', tables)
    assert "selected: 0" in pages.get("/compare", 404)
    assert "Select more jobs" in pages.get(f"/compare?job={one}&job={one}", 404)
    many = "&".join(f"job={pages.create('completed')}" for _ in range(7))
    refused = pages.get(f"/compare?{many}", 404)
    assert "Select fewer jobs" in refused and '<a href="/">Back to the list' in refused
    assert "There is no job nosuchid." in pages.get(f"/compare?job={one}&job=nosuchid", 404)


def test_submissions_say_why_they_did_not_count(pages: Pages) -> None:
    job_id, now = pages.create("running"), now_ms()
    about = {"job_id": job_id, "worker": "w1", "micro_batches": [1], "samples": 0, "bytes_up": 10, "bytes_down": 10}
    seconds = {"waiting_s": 0.5, "computing_s": 1.0, "encoding_s": 0.25, "uploading_s": 0.25}
    with pages.services.database.write() as session:
        for n, outcome in enumerate(("accepted", "stale", "lease_lost")):
            versions = {"base_version": 3, "current_version": 3 + n}
            session.add(
                Submission(
                    **about, **seconds, **versions, stream_id=f"{n}-0", nonce=f"n{n}", outcome=outcome, at_ms=now
                )
            )
    pages.change(job_id, accepted=1, stale=1, lease_lost=1)
    html = pages.get(f"/jobs/{job_id}/submissions")
    assert "computed on version 3 when version 4 was current" in html
    assert "its lease had expired" in html
    only = pages.get(f"/jobs/{job_id}/submissions?outcome=stale")
    assert "when version 4 was current" in only and "its lease had expired" not in only
    assert "No submissions match." in pages.get(f"/jobs/{job_id}/submissions?worker=w2")
    job = pages.get(f"/jobs/{job_id}")
    assert "1 lease lost" in job and "50 %" in job


def test_workers_page_lists_machines_and_teaches_where_there_are_none(pages: Pages) -> None:
    worker = WorkerInfo("studio01", "mac-studio", "mps", ("mnist",), {"torch": "2.15.0"}, 64 * 10**9, "studio", 7)
    register(pages.redis, worker)
    html = pages.get("/workers")
    for word in ("mac-studio", "mps", "64.0 GB", "mnist", "torch 2.15.0", "idle"):
        assert word in html
    unregister(pages.redis, worker.id)
    assert "computeshare-worker --queue NAME" in pages.get("/workers")


def test_workers_page_says_that_the_broker_is_away(tmp_path: Path) -> None:
    pages = Pages(Settings(home=tmp_path, redis_url="redis://127.0.0.1:1/0"))
    assert "Workers cannot be listed at the moment" in pages.get("/workers")


def test_the_form_says_nothing_of_queues_while_the_broker_is_away(pages: Pages, tmp_path: Path) -> None:
    assert "No worker serves this queue yet" in pages.get("/new")
    away = Pages(Settings(home=tmp_path / "away", redis_url="redis://127.0.0.1:1/0"))
    assert "No worker serves this queue yet" not in away.get("/new")


def test_a_recipe_is_shown_as_text_whatever_it_says(pages: Pages, tmp_path: Path) -> None:
    source = f"# {HOSTILE}\n</pre></code>\n# seen \u202e unseen\n"
    files = {"recipe.py": source, "lib/a'b.py": "x = 1\n"}
    recipe, _ = pages.services.recipes.add(RecipeRequest(files=files, name=HOSTILE))
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "initial.safetensors").write_bytes(b"weights")
    facts = FACTS | {"initial": pages.services.bundles.add(tmp_path / "state").digest, "requires": ["numpy>=2"]}
    given = {"dataset": None, "model": None, "recipe": recipe.digest, "recipe_facts": facts}
    job_id = pages.create("completed", **given, recipe_args={"width": HOSTILE})
    html = pages.get(f"/jobs/{job_id}")
    assert recipe.digest in html and "numpy&gt;=2" in html and "lib/a&#39;b.py" in html
    assert HOSTILE not in html and "&lt;/pre&gt;&lt;/code&gt;" in html and "\u202e" not in html
    pages.services.recipes.delete(recipe.digest)
    assert "Its files were removed" in pages.get(f"/jobs/{job_id}")


def test_who_helped_is_summed_by_machine_over_all_jobs(pages: Pages) -> None:
    assert "Nobody has computed anything yet" in pages.get("/workers")
    now = now_ms()
    for number, (worker, name, samples, person) in enumerate(
        (
            ("w1a", "studio", 300, None),
            ("w1b", "studio", 500, None),
            ("w2", HOSTILE, 150, "Anna"),
            ("w3", "mac", 50, ""),
        )
    ):
        job_id, joined = pages.create("completed"), now - 7_200_000
        about = {"device": "cpu", "samples": samples, "seen_ms": now, "left_ms": now, "joined_ms": joined}
        with pages.services.database.write() as session:
            session.add(WorkerStat(job_id=job_id, worker=worker, name=name, person=person, **about))
            told = {"worker": worker, "number": number}
            session.add(Event(job_id=job_id, type="joined", at_ms=joined, data=told))
            session.add(Event(job_id=job_id, type="left", at_ms=now - 3_600_000, data=told))
    pages.services.contributions.forget()
    answer = pages.client.get("/v1/workers/contributions").json()
    told = [(one["name"], one["samples"], one["share"], one["hours"], one["jobs"]) for one in answer["items"]]
    assert told == [("studio", 800, 0.8, 2.0, 2), (HOSTILE, 150, 0.15, 1.0, 1), ("mac", 50, 0.05, 1.0, 1)]
    summed = [(one["person"], one["samples"], one["hours"], one["jobs"], one["machines"]) for one in answer["people"]]
    assert summed == [("owner", 800, 2.0, 2, 1), ("Anna", 150, 1.0, 1, 1), (None, 50, 1.0, 1, 1)]
    html = pages.get("/workers").partition('id="helped"')[2]
    assert "1,000 samples in 4.0 hours" in html and "80 %" in html and "studio" in html
    assert html.index(">owner ") < html.index("studio") < html.index(">Anna ") < html.index(">No name given ")
