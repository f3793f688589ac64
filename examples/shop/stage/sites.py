"""Sites: the shop and its headquarters, each with a PostgreSQL of its own, a RabbitMQ and a bank between them."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import psycopg

from ergon_framework.facts.model import Pair
from stage.parts import Part, Parts, probed
from tests.servers.certificates import Authority
from tests.servers.packets import PacketDrop
from tests.servers.postgres import PrivatePostgres, free_port
from tests.servers.rabbitmq import PrivateRabbitMQ

PAIR = Pair("shop", "headquarters")
SHOP = Path(__file__).parents[1]
ERGON = str(Path(sys.executable).with_name("ergon"))


class Sites:
    """Everything that runs, below *folder*; the programs are those of the example, as they are."""

    def __init__(self, folder: Path, *, trouble: float, forgetful: bool) -> None:
        if shutil.which("node") is None:
            raise SystemExit("the demo needs Node for invoices, and found no `node` on the PATH; install nodejs")
        self.folder = folder
        folder.chmod(0o755)  # PostgreSQL runs as a user of its own where this runs as root
        self.logs = self._made("logs")
        self.shop = PrivatePostgres(folder / "shop-postgres")
        self.headquarters = PrivatePostgres(folder / "headquarters-postgres")
        self.rabbitmq = PrivateRabbitMQ(folder / "rabbitmq")
        self.bank_port, self.facts_port = free_port(), free_port()
        self.bank_line, self.facts_line = PacketDrop(self.bank_port), PacketDrop(self.facts_port)
        self.charges = folder / "charges.jsonl"
        self.contents = {site: self._made(f"{site}-contents") for site in ("shop", "headquarters")}
        self.parts = Parts(SHOP)
        self._trouble = trouble
        self._forgetful = forgetful

    def dsn(self, site: str) -> str:
        server = self.shop if site == "shop" else self.headquarters
        return server.dsn("postgres")

    def start(self) -> None:
        """Servers, tables, certificates, and then the processes; it returns when all are ready."""
        for server in (self.shop, self.headquarters, self.rabbitmq):
            server.start()
        for site in ("shop", "headquarters"):
            words = [ERGON, "db", "upgrade"]
            subprocess.run(words, env=self._env(ERGON_POSTGRES__DSN=self.dsn(site)), check=True, capture_output=True)
            with psycopg.connect(self.dsn(site)) as connection:
                connection.execute((SHOP / f"{site}.sql").read_text(encoding="utf-8"))
        authority = Authority(self._made("certificates"))
        self._certificates = {
            "server": authority.issue("server"),
            **{zone: authority.issue(zone, zones=[zone]) for zone in ("shop", "headquarters")},
        }
        self.parts.all = self._parts()
        self.parts.start(patience=90)

    def check_lines(self) -> None:
        """Cut one that nobody uses yet: who may not do that is told now, and not after half an hour."""
        self.bank_line.cut()
        self.bank_line.mend()

    def end(self) -> None:
        for line in (self.bank_line, self.facts_line, self.shop, self.headquarters, self.rabbitmq):
            line.mend()
        self.parts.end()
        for server in (self.shop, self.headquarters, self.rabbitmq):
            server.kill()

    def _parts(self) -> list[Part]:
        shop = self._env(
            **self._as("shop"),
            ERGON_POSTGRES__DSN=self.dsn("shop"),
            ERGON_RABBITMQ__URL=self.rabbitmq.url,
            BANK_URL=f"http://127.0.0.1:{self.bank_port}",
        )
        headquarters = self._env(
            **self._as("headquarters"),
            ERGON_POSTGRES__DSN=self.dsn("headquarters"),
            CONTENTS=str(self.contents["headquarters"]),
        )
        bank = [sys.executable, "bank.py", "--port", str(self.bank_port), "--ledger", str(self.charges)]
        bank += ["--trouble", str(self._trouble), *(["--forgetful"] if self._forgetful else [])]
        serve = [ERGON, "facts", "serve", "--zone", "shop", "--listen", f"127.0.0.1:{self.facts_port}"]
        serve += ["--contents", str(self.contents["shop"])]
        return [
            self._part("bank", bank, self._env()),
            self._part("serve", serve, {**shop, **self._as("server")}),
            self._part("charge", [ERGON, "run", "charging:charge", "--streaming", "--config", "shop.toml"], shop),
            self._part("invoice", [ERGON, "run", "invoicing:task", "--streaming", "--config", "shop.toml"], shop),
            self._part("replicate", [ERGON, "facts", "replicate", "replication:replicas"], headquarters),
            self._part(
                "book", [ERGON, "run", "ledger:book", "--streaming", "--config", "headquarters.toml"], headquarters
            ),
        ]

    def _part(self, name: str, words: list[str], env: dict[str, str]) -> Part:
        log = self.logs / f"{name}.log"
        if name in {"bank", "serve"}:
            port = self.bank_port if name == "bank" else self.facts_port
            return Part(name, words, env, log, lambda: _listens(port))
        probe = self.logs / f"{name}.probe"
        return Part(name, [*words, "--probe-file", str(probe)], env, log, probed(probe))

    def _as(self, who: str) -> dict[str, str]:
        files = self._certificates[who]
        return {
            "ERGON_FACTS_SERVER": f"localhost:{self.facts_port}",
            "ERGON_FACTS_TLS_CERT": str(files.certificate),
            "ERGON_FACTS_TLS_KEY": str(files.key),
            "ERGON_FACTS_TLS_CA": str(files.authorities),
        }

    def _made(self, name: str) -> Path:
        path = self.folder / name
        path.mkdir(parents=True)
        return path

    @staticmethod
    def _env(**given: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("ERGON_", "PYTHON", "COV_"))}
        return {**kept, **given}


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0
