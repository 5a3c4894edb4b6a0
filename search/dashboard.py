"""Open Optuna Dashboard on a study database, also while a search goes on.

    python -m search.dashboard
    python -m search.dashboard --storage sqlite:///study.db --port 8080

Constraints are shown as such, every trial has a note that says how it ended and why, the feasible front is a figure
of the study, and exported manifests and workers' logs are its artifacts. Exit codes: 0 ended by Ctrl-C, 1 there is
nothing to show, 2 bad arguments.
"""

from __future__ import annotations

import argparse
import ipaddress
import sys
from socketserver import ThreadingMixIn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from search.cli import DEFAULT_STORAGE, add_output_arguments, fail, set_up_errors


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="python -m search.dashboard", description="Open Optuna Dashboard on a study.")
    p.add_argument("--storage", metavar="URL", help="study database (default sqlite:///study.db)")
    p.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen at (default 127.0.0.1)")
    p.add_argument("--port", type=int, default=8080, metavar="N", help="port to listen at (default 8080)")
    add_output_arguments(p, json=False)
    return p


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    def log_message(self, *_: object) -> None:
        """Requests are nobody's business."""


def main(argv: list[str] | None = None) -> int:
    """Serve until interrupted; returns the exit code."""
    args = parser().parse_args(argv)
    with set_up_errors(args.debug):
        try:
            from optuna_dashboard import wsgi
        except ImportError:
            fail("Optuna Dashboard is not installed: pip install 'vllm-pareto[dashboard]'.")
        from search.interrupt import interruptible
        from search.review import ReviewStorage

        storage = ReviewStorage(args.storage or DEFAULT_STORAGE)
        app = wsgi(storage, artifact_store=storage.attachments)
        try:
            server = make_server(args.host, args.port, app, server_class=_Server, handler_class=_Quiet)
        except (OSError, OverflowError) as error:
            fail(f"Cannot listen at {args.host}:{args.port} ({error}): choose another --port.")
        if not _loopback(args.host):
            print(f"WARNING: whoever reaches {args.host} can read and DELETE studies: there is no login.", flush=True)
        print(f"Optuna Dashboard: http://{args.host}:{server.server_port}/dashboard (Ctrl-C ends it)", flush=True)
        try:
            with interruptible():
                server.serve_forever()
        except KeyboardInterrupt:
            print()
        finally:
            server.server_close()
    return 0


def _loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


if __name__ == "__main__":
    sys.exit(main())
