"""REST routes to make and manage invites, and the routes behind an invite's link."""

from typing import Annotated
from urllib.parse import urlsplit

import segno
from fastapi import APIRouter, Path, Request, Response
from fastapi.responses import HTMLResponse

from api.deps import InvitesDep
from api.errors import NotFound
from api.fleet.invites import UNREACHABLE, Introduction, InviteService
from api.fleet.worker_wheel import base_of, commands
from api.http.security import is_loopback
from api.pages.page_response import missing, render
from api.schemas import Admission, InviteCreated, InviteList, InvitePublic, InviteRequest, JoinRequest, KeyRequest
from computeshare.settings import is_gateway_url

router = APIRouter(tags=["workers"])

OWN_NAME = (
    "only this machine can open the address in the link. Stop computeshare up with Ctrl-C and start it again with "
    "--lan, for machines on your network, or with --public-url, for others; then create a new invite"
)
UNENCRYPTED = (
    "workers accept this link within a local network only, as it is not encrypted: set COMPUTESHARE_PUBLIC_URL to an "
    "https:// address of this control plane (a tunnel's will do), and restart it"
)
LAN = "computeshare up --lan"
InviteId = Annotated[str, Path(max_length=64)]
Code = Annotated[str, Path(max_length=100, description="last part of the invite's link")]


@router.post("/v1/invites", status_code=201)
def create_invite(body: InviteRequest, service: InvitesDep, request: Request, response: Response) -> InviteCreated:
    """Make a link that admits one worker, once. The link is not shown again."""
    invite, code = service.create(body.queue, body.minutes, body.days, body.person)
    url = _link(service, request, code)
    alone = not service.public_url and is_loopback(request.url.hostname or "")
    open_link = not is_gateway_url(url.partition("/join/")[0], nearby=True)
    note = service.note()
    found = {UNREACHABLE: note == UNREACHABLE, OWN_NAME: alone, UNENCRYPTED: open_link}
    obstacles = [obstacle for obstacle, applies in found.items() if applies]
    response.headers["Location"] = f"/v1/invites/{invite.id}"
    return InviteCreated(
        **invite.model_dump(),
        url=url,
        command=join_command(url, service.fingerprint),
        new_machine=_new_machine(url, service),
        qr=segno.make(url, micro=False).svg_data_uri(scale=4, border=2, dark="#000", light="#fff"),
        note="; and ".join(obstacles) or note,
        blocked=bool(obstacles),
        remedy=LAN if alone else None,
    )


@router.get("/v1/invites")
def list_invites(service: InvitesDep) -> InviteList:
    """Invites of the last day, newest first."""
    return service.list()


@router.get("/v1/invites/{invite_id}")
def show_invite_status(invite_id: InviteId, service: InvitesDep) -> InvitePublic:
    """An invite's status, and the worker that took it up."""
    return service.show(invite_id)


@router.delete("/v1/invites/{invite_id}", status_code=204, response_class=Response)
def withdraw_invite(invite_id: InviteId, service: InvitesDep) -> None:
    """Withdraw an invite. A machine that joined through the gateway is cut off; one with the broker's address stays."""
    service.withdraw(invite_id)


@router.get("/join/{code}", include_in_schema=False, response_class=HTMLResponse)
def show_invite(code: Code, service: InvitesDep, request: Request) -> HTMLResponse:
    """The page behind an invite's link: the command to run on the invited machine."""
    try:
        invite = service.find(code)
    except NotFound as error:
        return missing(request, "There is no such invite", str(error))
    url = _link(service, request, code)
    made = join_command(url, service.fingerprint)
    return render(request, "join.html", invite=invite, command=made, new_machine=_new_machine(url, service))


@router.post("/join/{code}")
def take_up_invite(code: Code, body: JoinRequest, service: InvitesDep, request: Request) -> Admission:
    """Exchange an invite for a way to the broker, for one machine. A worker needs no token for this call."""
    host = request.client.host if request.client else ""
    machine = Introduction(body.name, body.public_key, body.signature)
    return service.take_up(code, machine, is_loopback(host), host)


@router.post("/join/machines/{machine_id}/key", status_code=204, response_class=Response)
def replace_machine_key(
    machine_id: Annotated[str, Path(max_length=64)], body: KeyRequest, service: InvitesDep, request: Request
) -> None:
    """Replace a machine's key at the gateway by a new one; the signature takes a token's place."""
    host = request.client.host if request.client else ""
    service.replace_key(machine_id, body.public_key, body.signature, host)


def _link(service: InviteService, request: Request, code: str) -> str:
    own = str(request.url_for("show_invite", code=code))
    return service.public_url + urlsplit(own).path if service.public_url else own


def _new_machine(url: str, service: InviteService) -> list[str]:
    return commands(base_of(url), join_command(url, service.fingerprint), service.key_pin)


def join_command(url: str, fingerprint: str = "") -> str:
    """The shell command for the invited machine; `url`, an invite's link, holds no characters special to a shell."""
    base, _, code = url.rpartition("/join/")
    pin = f" --tls-fingerprint {fingerprint}" if fingerprint else ""
    return f"computeshare-worker --join {base}#{code}{pin}"
