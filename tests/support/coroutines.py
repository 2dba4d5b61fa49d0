"""Coroutines in tests."""

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Found = TypeVar("Found")


def asynchronously(coroutine: Coroutine[Any, Any, Found]) -> Found:
    """What it returns, run in a thread of its own: a browser that an earlier test uses keeps a loop in this one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()
