"""A job's events for asyncio programs: the client's only asynchronous module."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from urllib.parse import quote

import httpx2

from computeshare.client.api.address import NoServer, outages, resumed
from computeshare.client.api.calls import Client
from computeshare.client.api.models import Event, Job, Problem, raise_for_problem
from computeshare.client.api.models import event as read_event
from computeshare.client.event_feed import CLOSED, Course


async def stream(client: Client, job: Job, after: int | None = None) -> AsyncGenerator[Event]:
    """As `Client.follow`, asynchronously; cancelling or closing the generator closes its connections."""
    course = Course.of(job, after)
    async with httpx2.AsyncClient(**client.connection) as http:
        while not course.ended:
            lost = CLOSED
            try:
                async with aclosing(_connected(client, http, job["id"], course.last)) as events:
                    async for event in events:
                        course.saw(event)
                        yield event
            except (NoServer, Problem) as error:
                lost = course.cut(error)
            if not course.ended:
                yield course.lost(lost)
                await asyncio.sleep(course.pause())


async def _connected(client: Client, http: httpx2.AsyncClient, job_id: str, after: int | None) -> AsyncGenerator[Event]:
    """Yield a job's events above the id `after` until this connection ends."""
    path = f"/v1/jobs/{quote(job_id, safe='')}/events"
    with outages(client.url):
        async with http.sse(path, **resumed(client.connection, after)) as source:
            if not source.response.is_success:
                await source.response.aread()
                raise_for_problem(source.response)
            async for message in source:
                yield read_event(message)
