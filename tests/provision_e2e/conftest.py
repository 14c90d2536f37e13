"""One provisioning site for all tests, and a MachineDeployment of its own for each.

Root, and what `make provision-e2e` brings: a testbed of its own name. The site takes most of a minute to come up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slurmlet.testbed.provisioning.provision_site import (
    ProvisionSite,
    SiteSettings,
    definitions_in,
    running_site,
)
from slurmlet.testbed.provisioning.site_objects import Workers
from slurmlet.testbed.provisioning.site_operator import SiteOperator
from tests.provision_e2e.worker_machines import Farm

ROOT = Path(__file__).parents[2]
# Pictures and tables of a run: the tests write them, a person looks at them.
PACKAGING = ROOT / "packaging" / "provision"
RESULTS = ROOT / "build" / "provision"


@pytest.fixture(scope="session")
def site() -> Iterator[ProvisionSite]:
    RESULTS.mkdir(parents=True, exist_ok=True)
    with running_site(SiteSettings(machines=8), definitions_in(PACKAGING / "crds")) as here:
        yield here


@pytest.fixture(scope="session")
def operator_of_all(site: ProvisionSite) -> Iterator[SiteOperator]:
    process = SiteOperator(site)
    process.install(PACKAGING / "manifests" / "install.yaml")
    process.start()
    yield process
    process.stop()


@pytest.fixture
def operator(operator_of_all: SiteOperator) -> SiteOperator:
    """The operator that all tests share; a test that ended it need not bring it back."""
    if not operator_of_all.running():
        operator_of_all.start()
    return operator_of_all


MakeFarm = Callable[..., Farm]


@pytest.fixture
def farm(site: ProvisionSite, request: pytest.FixtureRequest) -> Iterator[MakeFarm]:
    """`farm(maximum=2)` makes one; it goes with the test."""
    made: list[Farm] = []

    def make(name: str = "small", **changes: Any) -> Farm:
        features = changes.pop("features", (name,))
        made.append(Farm(site, Workers(name=name, features=features, **changes)))
        return made[-1].make()

    yield make
    report = getattr(request.node, "report_of_call", None)
    if report is not None and report.failed:
        for one in made:
            print(one.logs())
    for one in made:
        one.remove()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    if report.when == "call":
        item.report_of_call = report  # type: ignore[attr-defined]
    return report
