"""search.run as a user would type it; faults of the disk happen in this process.

python -m tests.faults.driver FAULTS_FOLDER ARGUMENTS OF search.run
"""

import os
import sys
from pathlib import Path

from sqlalchemy import Engine, event

from search import run


def break_the_disk_when_asked(folder):
    """From when a flag file is there, SQLite finds no free page, or may not write, on every connection."""

    @event.listens_for(Engine, "begin")
    def begin(connection):
        if (folder / "fill disk").exists():
            pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
            connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
        if (folder / "write-protect").exists():
            connection.exec_driver_sql("PRAGMA query_only = 1")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for flag in ("fill disk", "write-protect"):  # an operator has made room
        (folder / flag).unlink(missing_ok=True)
    os.environ["FAULTS_PARENT"] = str(os.getpid())
    break_the_disk_when_asked(folder)
    sys.exit(run.main(sys.argv[2:]))
