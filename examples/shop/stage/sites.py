"""Sites: the shop and its headquarters, each with its own PostgreSQL, with a RabbitMQ and a bank between them."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import psycopg

from ergon_framework.facts import ZonePair
from stage.parts import Part, Parts, create_probe_check
from tests.servers.certificates import CertificateAuthority
from tests.servers.packets import PacketDrop
from tests.servers.postgres import PrivatePostgres, free_port
from tests.servers.rabbitmq import PrivateRabbitMQ

PAIR = ZonePair("shop", "headquarters")
SHOP_FOLDER = Path(__file__).parents[1]
ERGON = str(Path(sys.executable).with_name("ergon"))


class Sites:
    """Everything that runs, in *folder*; the programs are those of the example, unchanged."""

    def __init__(self, folder: Path, *, failure_rate: float, forgetful: bool) -> None:
        if shutil.which("node") is None:
            raise SystemExit("the demo needs Node for invoices, and found no `node` on the PATH; install nodejs")
        self.folder = folder
        folder.chmod(0o755)  # PostgreSQL runs as its own user where this runs as root
        self.logs = self._create_folder("logs")
        self.shop = PrivatePostgres(folder / "shop-postgres")
        self.headquarters = PrivatePostgres(folder / "headquarters-postgres")
        self.rabbitmq = PrivateRabbitMQ(folder / "rabbitmq")
        self.bank_port, self.facts_port = free_port(), free_port()
        self.bank_link, self.facts_link = PacketDrop(self.bank_port), PacketDrop(self.facts_port)
        self.charges = folder / "charges.jsonl"
        self.contents = {site: self._create_folder(f"{site}-contents") for site in ("shop", "headquarters")}
        self.parts = Parts(SHOP_FOLDER)
        self._failure_rate = failure_rate
        self._forgetful = forgetful

    def dsn(self, site: str) -> str:
        server = self.shop if site == "shop" else self.headquarters
        return server.dsn("postgres")

    def start(self) -> None:
        """Start servers, tables, certificates, and then the processes; return when all are ready."""
        for server in (self.shop, self.headquarters, self.rabbitmq):
            server.start()
        for site in ("shop", "headquarters"):
            command = [ERGON, "db", "upgrade"]
            subprocess.run(
                command,
                env=self._build_environment(ERGON_POSTGRES__DSN=self.dsn(site)),
                check=True,
                capture_output=True,
            )
            with psycopg.connect(self.dsn(site)) as connection:
                connection.execute((SHOP_FOLDER / f"{site}.sql").read_text(encoding="utf-8"))
        authority = CertificateAuthority(self._create_folder("certificates"))
        self._certificates = {
            "server": authority.issue("server"),
            **{zone: authority.issue(zone, zones=[zone]) for zone in ("shop", "headquarters")},
        }
        self.parts.all = self._build_parts()
        self.parts.start(timeout=90)

    def check_links(self) -> None:
        """Cut an unused connection: missing permission fails here, and not after half an hour."""
        self.bank_link.partition_network()
        self.bank_link.heal_network()

    def stop(self) -> None:
        for link in (self.bank_link, self.facts_link, self.shop, self.headquarters, self.rabbitmq):
            link.heal_network()
        self.parts.stop()
        for server in (self.shop, self.headquarters, self.rabbitmq):
            server.kill()

    def _build_parts(self) -> list[Part]:
        shop = self._build_environment(
            **self._tls_environment("shop"),
            ERGON_POSTGRES__DSN=self.dsn("shop"),
            ERGON_RABBITMQ__URL=self.rabbitmq.url,
            BANK_URL=f"http://127.0.0.1:{self.bank_port}",
        )
        headquarters = self._build_environment(
            **self._tls_environment("headquarters"),
            ERGON_POSTGRES__DSN=self.dsn("headquarters"),
            CONTENTS=str(self.contents["headquarters"]),
        )
        bank_command = [sys.executable, "bank.py", "--port", str(self.bank_port), "--ledger", str(self.charges)]
        bank_command += ["--trouble", str(self._failure_rate), *(["--forgetful"] if self._forgetful else [])]
        serve_command = [ERGON, "facts", "serve", "--zone", "shop", "--listen", f"127.0.0.1:{self.facts_port}"]
        serve_command += ["--artifact-dir", str(self.contents["shop"])]
        return [
            self._build_part("bank", bank_command, self._build_environment()),
            self._build_part("serve", serve_command, {**shop, **self._tls_environment("server")}),
            self._build_part("charge", [ERGON, "run", "charging:charge", "--streaming", "--config", "shop.toml"], shop),
            self._build_part("invoice", [ERGON, "run", "invoicing:task", "--streaming", "--config", "shop.toml"], shop),
            self._build_part("replicate", [ERGON, "facts", "replicate", "replication:replicas"], headquarters),
            self._build_part(
                "book", [ERGON, "run", "ledger:book", "--streaming", "--config", "headquarters.toml"], headquarters
            ),
        ]

    def _build_part(self, name: str, command: list[str], env: dict[str, str]) -> Part:
        log = self.logs / f"{name}.log"
        if name in {"bank", "serve"}:
            port = self.bank_port if name == "bank" else self.facts_port
            return Part(name, command, env, log, lambda: _is_listening(port))
        probe = self.logs / f"{name}.probe"
        return Part(name, [*command, "--probe-file", str(probe)], env, log, create_probe_check(probe))

    def _tls_environment(self, certificate: str) -> dict[str, str]:
        files = self._certificates[certificate]
        return {
            "ERGON_FACTS_SERVER": f"localhost:{self.facts_port}",
            "ERGON_FACTS_TLS_CERT": str(files.certificate),
            "ERGON_FACTS_TLS_KEY": str(files.key),
            "ERGON_FACTS_TLS_CA": str(files.authorities),
        }

    def _create_folder(self, name: str) -> Path:
        path = self.folder / name
        path.mkdir(parents=True)
        return path

    @staticmethod
    def _build_environment(**variables: str) -> dict[str, str]:
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(("ERGON_", "PYTHON", "COV_"))
        }
        return {**inherited, **variables}


def _is_listening(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0
