"""Hostile words, and the check that a page holds nothing that its policy forbids."""

from html.parser import HTMLParser

HOSTILE = '<script>alert(1)</script><b onclick="x">\'&'


class Reader(HTMLParser):
    """Finds what the content security policy forbids, or what leads elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.forbidden: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.forbidden += [f"{tag} {name}" for name in given if name == "style" or name.startswith("on")]
        self.forbidden += [value for name in ("src", "href") if (value := given.get(name)) and "//" in value]
        if tag == "style" or (tag == "script" and "src" not in given and given.get("type") != "application/json"):
            self.forbidden.append(f"inline {tag}")


def assert_allowed_by_policy(html: str) -> None:
    reader = Reader()
    reader.feed(html)
    assert reader.forbidden == []
