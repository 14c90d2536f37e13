"""How a SlurmCluster's Slurm is reached, and who shares a look at it."""

from __future__ import annotations

import asyncio
import base64
import stat
from pathlib import Path
from typing import Any

import pytest

from slurmlet.base.errors import SlurmError
from slurmlet.kube.client import ApiError
from slurmlet.operators.provisioning.slurm_access import SlurmConnections, SlurmLooks
from slurmlet.slurm.admin_commands import CommandAdmin
from slurmlet.slurm.admin_fake import FakeAdmin
from slurmlet.slurm.admin_rest import RestAdmin

REST = {"url": "https://slurm:6820", "tokenSecretRef": {"name": "token", "key": "jwt"}}


def cluster(**connection: Any) -> dict[str, Any]:
    return {"metadata": {"namespace": "ns", "name": "lab"}, "spec": {"connection": connection}}


class Secrets:
    """As much of an ApiClient as is asked here."""

    def __init__(self, **secrets: dict[str, bytes]) -> None:
        self.secrets = secrets

    async def get(self, path: str) -> dict[str, Any]:
        name = path.rpartition("/")[2]
        if name not in self.secrets:
            raise ApiError(404, f"{name} not found")
        return {"data": {key: base64.b64encode(value).decode() for key, value in self.secrets[name].items()}}


def connections(secrets: Secrets, directory: Path) -> SlurmConnections:
    return SlurmConnections(secrets, directory, ["ns"])  # type: ignore[arg-type]


def test_a_token_is_kept_from_others_and_replaced_with_its_secret(tmp_path: Path) -> None:
    async def scenario() -> None:
        secrets = Secrets(token={"jwt": b"first"})
        made = connections(secrets, tmp_path)
        admin = await made.admin(cluster(rest=REST))
        assert isinstance(admin, RestAdmin)
        (file,) = tmp_path.iterdir()
        assert (file.read_bytes(), stat.S_IMODE(file.stat().st_mode)) == (b"first", 0o600)
        secrets.secrets["token"]["jwt"] = b"second"
        assert await made.admin(cluster(rest=REST)) is admin, "the connection reads the file again by itself"
        assert file.read_bytes() == b"second"
        await made.close()

    asyncio.run(scenario())


def test_another_url_or_authority_makes_another_connection(tmp_path: Path) -> None:
    async def scenario() -> None:
        secrets = Secrets(token={"jwt": b"t"}, ca={"ca.crt": b"one"})
        made = connections(secrets, tmp_path)
        trusting = {**REST, "caSecretRef": {"name": "ca", "key": "ca.crt"}}
        first = await made.admin(cluster(rest=REST))
        second = await made.admin(cluster(rest=trusting))
        secrets.secrets["ca"]["ca.crt"] = b"two"
        third = await made.admin(cluster(rest=trusting))
        assert len({id(first), id(second), id(third)}) == 3
        await made.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("secrets", [Secrets(), Secrets(token={"other": b"x"})])
def test_a_secret_that_is_not_there_is_told_by_name(secrets: Secrets, tmp_path: Path) -> None:
    with pytest.raises(SlurmError, match="Secret token with key jwt") as caught:
        asyncio.run(connections(secrets, tmp_path).admin(cluster(rest=REST)))
    assert caught.value.transient


def test_commands_and_sockets_need_no_secret(tmp_path: Path) -> None:
    async def scenario() -> None:
        made = connections(Secrets(), tmp_path)
        commands = cluster(commands={"configFile": "/etc/other/slurm.conf"})
        assert isinstance(await made.admin(commands), CommandAdmin)
        assert isinstance(await made.admin(cluster(socket={"path": "/run/slurmrestd.sock"})), RestAdmin)
        await made.close()

    asyncio.run(scenario())


class Source:
    def __init__(self) -> None:
        self.slurm = FakeAdmin()
        self.looks = 0
        self.slurm.hooks["queue"] = self._count

    async def _count(self) -> None:
        self.looks += 1
        await asyncio.sleep(0)

    async def admin(self, _: Any) -> FakeAdmin:
        return self.slurm


def test_who_asks_together_shares_a_look_and_nobody_gets_one_from_before_the_question() -> None:
    async def scenario() -> None:
        source, now_s = Source(), [0.0]
        looks = SlurmLooks(source, lambda: now_s[0])
        await asyncio.gather(*(looks.look(cluster()) for _ in range(5)))
        assert source.looks == 1
        now_s[0] = 0.5
        await looks.look(cluster())
        assert source.looks == 1
        source.slurm.register("w1")
        found = await looks.look(cluster(), max_age_s=0.0)
        assert (source.looks, "w1" in found.by_name) == (2, True)
        looks.forget(cluster())
        await looks.look(cluster())
        assert source.looks == 3

    asyncio.run(scenario())


def test_a_suspended_job_is_seen_on_its_node_though_the_node_says_idle() -> None:
    async def scenario() -> None:
        source = Source()
        source.slurm.register("w1")
        job = source.slurm.submit()
        source.slurm.start(job, ["w1"], state="SUSPENDED")
        source.slurm.register("w1", state="IDLE", cpus_allocated=0)
        look = await SlurmLooks(source).look(cluster())
        assert not look.by_name["w1"].busy
        assert look.in_use("w1")

    asyncio.run(scenario())
