"""Real workers that are drained, removed, shared among jobs and taken over, in mid-job; and the page that does it."""

import secrets
from typing import Any

import psutil
import pytest
from playwright.sync_api import expect

from computeshare.jobspec.spec import JobSpec
from computeshare.queue import WorkerInfo, register, unregister
from tests.support.browser import Site, in_every_window
from tests.support.control_plane import DIGITS_MLP, ControlPlane

pytestmark = pytest.mark.e2e
UP = ("--workers", "2", "--queue", "e2e")
ENDLESS: dict[str, Any] = {**DIGITS_MLP, "rounds": 1_000_000, "checkpoint_every": 0, "evaluate_every": 0}


def fleet(plane: ControlPlane) -> dict[str, dict[str, Any]]:
    """The workers that are online, by name."""
    return {worker["name"]: worker for worker in plane.get("/v1/workers")["items"]}


def sharing(plane: ControlPlane) -> dict[str, int]:
    """How many workers take part in each job."""
    jobs = plane.get("/v1/jobs", status="running")["items"]
    return {job["id"]: job["workers"] for job in jobs if job["workers"]}


def check_ledger_and_cancel(plane: ControlPlane, job_id: str) -> None:
    """Hold a job where it is: every sample of its rounds has counted once."""
    assert plane.http.post(f"/v1/jobs/{job_id}/pause").status_code == 202
    plane.until("no worker", lambda: plane.job(job_id)["workers"] == 0)
    plane.until("no seat", lambda: all(worker["job_id"] != job_id for worker in fleet(plane).values()))
    epochs = plane.get(f"/v1/jobs/{job_id}/ledger")["epochs"]
    assert epochs and [e["counted"] for e in epochs] == [e["samples"] for e in epochs]
    assert sum(epoch["missing"] for epoch in epochs) == 0
    assert plane.http.post(f"/v1/jobs/{job_id}/cancel").status_code == 202


@pytest.mark.long
def test_a_worker_drained_in_mid_job_rests_while_the_job_goes_on_and_comes_back(plane: ControlPlane) -> None:
    job_id = plane.create(**ENDLESS)
    plane.until("two workers", lambda: plane.job(job_id)["workers"] == 2)
    worker = fleet(plane)["worker-1"]
    assert plane.http.post(f"/v1/workers/{worker['id']}/drain").json()["drained"] is True
    plane.until("it rests", lambda: fleet(plane)["worker-1"]["job_id"] is None)
    plane.reach(job_id, plane.job(job_id)["version"] + 200)
    resting = fleet(plane)["worker-1"]
    assert (resting["id"], resting["drained"], resting["job_id"]) == (worker["id"], True, None)
    part = {one["id"]: one for one in plane.get(f"/v1/jobs/{job_id}/workers")["items"]}[worker["id"]]
    assert (part["active"], part["left_reason"]) == (False, "the worker was asked to leave")
    assert plane.job(job_id)["workers"] == 1
    plane.http.post(f"/v1/workers/{worker['id']}/undrain")
    plane.until("it is back", lambda: plane.job(job_id)["workers"] == 2)
    check_ledger_and_cancel(plane, job_id)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_two_jobs_share_two_workers_and_a_third_of_higher_priority_takes_over_and_gives_back(
    plane: ControlPlane,
) -> None:
    first = plane.create(**ENDLESS, name="first")
    plane.until("both serve the first", lambda: sharing(plane) == {first: 2})
    second = plane.create(**ENDLESS, name="second")
    plane.until("one each", lambda: sharing(plane) == {first: 1, second: 1})
    urgent = plane.create(**{**ENDLESS, "rounds": 2000}, name="urgent", priority=10)
    plane.until("both serve the urgent one", lambda: sharing(plane) == {urgent: 2})
    waits = "Waiting: 2 workers on queue e2e serve jobs of higher priority"
    plane.until("the others say so", lambda: [plane.job(j)["reason"] for j in (first, second)] == [waits] * 2)
    plane.finish(urgent)
    plane.until("one each again", lambda: sharing(plane) == {first: 1, second: 1})
    for job_id in (first, second):
        check_ledger_and_cancel(plane, job_id)


@pytest.mark.long
def test_a_worker_that_is_removed_ends_and_is_not_started_again(plane: ControlPlane) -> None:
    pid = plane.pids("worker")[1]
    process = psutil.Process(pid)
    job_id = plane.create(**ENDLESS)
    plane.until("two workers", lambda: plane.job(job_id)["workers"] == 2)
    (worker,) = [one for one in fleet(plane).values() if one["pid"] == pid]
    assert plane.http.delete(f"/v1/workers/{worker['id']}").status_code == 204
    psutil.wait_procs([process], timeout=60)
    plane.until("up lets it go", lambda: len(plane.pids("worker")) == 1)
    assert not process.is_running()
    plane.until("it is forgotten", lambda: plane.http.delete(f"/v1/workers/{worker['id']}").status_code == 404)
    assert "leaving for good" in (plane.home / "logs" / "worker.log").read_text()
    plane.reach(job_id, plane.job(job_id)["version"] + 100)
    check_ledger_and_cancel(plane, job_id)


# The page


def studio(site: Site, name: str = "mac-studio") -> WorkerInfo:
    device, versions = "Apple M2 Ultra (MPS)", {"torch": "2.15"}
    worker = WorkerInfo(secrets.token_hex(6), name, device, ("lab",), versions, 64 * 10**9, "s", 7)
    register(site.redis, worker)
    return worker


@in_every_window
def test_a_worker_is_drained_undrained_and_removed_on_the_page_by_keyboard(site: Site, opened: Any) -> None:
    worker = studio(site)
    spec = JobSpec(dataset="digits", model="mlp", queue="lab", priority=7, name="waits there")
    job_id = site.services.jobs.create(spec).id
    page = opened("/workers")
    row = page.locator("#workers tbody tr").filter(has_text="mac-studio")
    expect(row).to_contain_text("Apple M2 Ultra (MPS)")
    expect(page.locator("#queues")).to_contain_text("waits there")
    expect(page.locator("#queues td[data-label=Priority]")).to_have_text("7")
    drain = page.get_by_role("button", name="Drain mac-studio", exact=True)
    drain.focus()
    page.keyboard.press("Enter")
    expect(row).to_contain_text("Drained: gets no work until undrained")
    register(site.redis, worker)
    page.get_by_role("button", name="Undrain mac-studio").click()
    expect(row).not_to_contain_text("Drained")
    register(site.redis, worker)
    page.get_by_role("button", name="Remove mac-studio").click()
    expect(page.get_by_role("dialog")).to_contain_text("The worker finishes its work unit and stops")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).not_to_be_visible()
    page.get_by_role("button", name="Remove mac-studio").click()
    page.get_by_role("button", name="Remove", exact=True).click()
    expect(row).to_contain_text("Being removed")
    unregister(site.redis, worker.id)
    expect(row).to_have_count(0)
    site.services.jobs.cancel(job_id)


def test_the_workers_page_reads_without_javascript(site: Site, opened: Any) -> None:
    worker = studio(site, "no-script")
    page = opened("/workers", viewport={"width": 390, "height": 800}, java_script_enabled=False)
    row = page.locator("#workers tbody tr").filter(has_text="no-script")
    expect(row.locator("noscript code")).to_have_text(f"computeshare workers drain {worker.id}")
    for verb in ("drain", "remove"):
        expect(page.locator(f"#{verb}-{worker.id}")).not_to_be_visible()
    unregister(site.redis, worker.id)
