"""tinyshakespeare: the real text, and its download from a server on this machine."""

import http.server
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from computeshare.errors import DatasetError
from computeshare.jobspec.catalog import catalog
from computeshare.jobspec.spec import JobSpec
from computeshare.tasks.registry import task_of
from computeshare.tasks.text import texts

NAME = "tinyshakespeare"
FILE = f"{NAME}/input.txt"


class Mirror:
    """Serves a content and counts how often it is asked for."""

    def __init__(self, content: bytes) -> None:
        self.content, self.asked = content, 0
        mirror = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                mirror.asked += 1
                self.send_response(200)
                self.end_headers()
                self.wfile.write(mirror.content)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def mirror(shakespeare_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    mirror = Mirror((shakespeare_dir / FILE).read_bytes())
    url = f"http://127.0.0.1:{mirror.server.server_address[1]}/input.txt"
    monkeypatch.setitem(texts.DEFINITIONS, NAME, replace(texts.DEFINITIONS[NAME], url=url))
    yield mirror
    mirror.server.shutdown()
    mirror.server.server_close()


def test_windows_are_those_of_the_text(shakespeare_dir: Path) -> None:
    text = (shakespeare_dir / FILE).read_text()
    entry, alphabet = catalog().texts[NAME], texts.DEFINITIONS[NAME].alphabet
    assert (len(text), "".join(sorted(set(text)))) == (entry.characters, alphabet)
    border = entry.characters * 9 // 10
    spec = JobSpec(dataset=NAME, model="gpt")
    for split, part in (("train", text[:border]), ("test", text[border:])):
        opened = task_of(spec).open(split, shakespeare_dir)  # type: ignore[arg-type]
        assert len(opened) == getattr(spec.facts, split) == (len(part) - 1) // 64
        last = len(opened) - 1
        symbols, targets = opened.batch(np.array([0, last]))
        told = ["".join(alphabet[symbol] for symbol in row) for row in (*symbols, *targets)]
        assert told == [part[:64], part[last * 64 :][:64], part[1:65], part[last * 64 + 1 :][:64]]


def test_a_missing_text_is_downloaded_once(tmp_path: Path, mirror: Mirror) -> None:
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: texts.prepare(NAME, tmp_path), range(3)))
    assert mirror.asked == 1
    assert (tmp_path / FILE).read_bytes() == mirror.content
    assert len(texts.open_split(NAME, "test", tmp_path, 64)) == 1742


def test_another_text_is_refused_and_not_kept(tmp_path: Path, mirror: Mirror) -> None:
    mirror.content = mirror.content[:-1]
    with pytest.raises(DatasetError, match="is damaged, or another text"):
        texts.prepare(NAME, tmp_path)
    assert not (tmp_path / FILE).exists()


def test_without_a_connection_the_file_to_copy_is_named(tmp_path: Path, mirror: Mirror) -> None:
    mirror.server.shutdown()
    mirror.server.server_close()
    with pytest.raises(DatasetError, match=r"input\.txt is missing, and the download failed: .*or copy the file"):
        texts.prepare(NAME, tmp_path)


def test_a_damaged_file_says_what_to_do(tmp_path: Path, shakespeare_dir: Path) -> None:
    (tmp_path / NAME).mkdir()
    shutil.copy(shakespeare_dir / FILE, tmp_path / FILE)
    with (tmp_path / FILE).open("ab") as file:
        file.write(b"!")
    with pytest.raises(DatasetError, match="delete it, so that it is downloaded again"):
        texts.open_split(NAME, "train", tmp_path, 64)
