"""Lists of files that stayed behind: stored once per project, and forgotten when no submission names them."""

from __future__ import annotations

from pathlib import Path

from shoal.store import Tx
from shoal.store.migrations import migrate
from shoal.store.sqlite import SqliteDatabase
from shoal.wire import LeftBehind


def test_a_list_of_files_is_kept_while_submissions_name_it_and_other_projects_cannot_read_it(
    tmp_path: Path,
) -> None:
    database = SqliteDatabase(tmp_path / "shoal.db")
    with database.connect_writer() as connection:
        database.begin_write(connection)
        migrate(connection)
        kept = Tx(connection).left_behind
        files = LeftBehind(folder="/home/ana/x", ignored=("data/", "a.bin"))
        digest = kept.put("vision", files, 10.0)
        assert kept.put("vision", files, 20.0) == digest
        assert kept.put("other", files, 5.0) != digest
        assert (kept.purge(15.0, 10), kept.get(digest)) == (1, files)
        assert (kept.purge(25.0, 10), kept.get(digest)) == (1, None)
        for at in (3.0, 1.0, 2.0):
            kept.put("vision", LeftBehind(folder=str(at)), at)
        assert [kept.purge(9.0, 2), kept.purge(9.0, 2), kept.purge(9.0, 2)] == [2, 1, 0]
        connection.rollback()
    database.close()
