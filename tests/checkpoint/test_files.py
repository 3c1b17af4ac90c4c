"""Durable files: whole or not at all, whatever the disk does, and never over something else."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import tracemalloc

import numpy as np
import pytest

from kvdist.checkpoint import files
from kvdist.checkpoint.files import (
    explained,
    make_durable,
    make_folder,
    read_intact,
    replace_file,
    require_intact,
    require_present,
    write_file,
    write_named_file,
)
from kvdist.checkpoint.snapshot import FileRecord
from kvdist.errors import CheckpointError
from tests.cases import each


def views(*parts):
    return [memoryview(part) for part in parts]


def refuse(number):
    def call(*arguments, **options):
        raise OSError(number, os.strerror(number))

    return call


@each("parts", [(), (b"",), (b"a",), (b"abc", b"", b"defgh"), (b"x" * (files.CHUNK_BYTES + 3),)])
def test_a_file_has_its_length_and_checksum_and_a_part_of_it_in_its_name(tmp_path, parts):
    record = write_file(tmp_path, "server-3", ".bin", views(*parts))
    content = b"".join(parts)
    digits = hashlib.sha256(content).hexdigest()
    assert record == FileRecord(f"server-3-{digits[:16]}.bin", len(content), digits)
    assert [path.name for path in tmp_path.iterdir()] == [record.name]
    assert read_intact(tmp_path, record) == content
    require_intact(tmp_path, record)


def test_the_folder_is_made_and_each_new_folder_is_made_durable_in_the_one_above(tmp_path, monkeypatch):
    durable = []
    monkeypatch.setattr(files, "make_durable", durable.append)
    folder = tmp_path / "a" / "b" / "step-1"
    write_file(folder, "server-0", ".bin", views(b"x"))
    assert durable == [tmp_path, tmp_path / "a", tmp_path / "a" / "b", folder]
    make_folder(folder)
    assert len(durable) == 4


def test_a_folder_below_a_file_is_an_error_of_the_disk(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError):
        make_folder(tmp_path / "file" / "step-1")
    with pytest.raises(OSError):
        make_folder(tmp_path / "file")


def test_a_write_that_takes_only_some_bytes_goes_on_with_the_rest(tmp_path, monkeypatch):
    real = open

    class Slow:
        def __init__(self, file):
            self.file = file

        def write(self, chunk):
            return self.file.write(chunk[:3])

        def fileno(self):
            return self.file.fileno()

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

    monkeypatch.setattr(files, "open", lambda *a, **k: Slow(real(*a, **k)), raising=False)
    record = write_file(tmp_path, "server-0", ".bin", views(b"0123456789", b"ab"))
    assert (tmp_path / record.name).read_bytes() == b"0123456789ab"


def test_a_file_is_replaced_at_one_stroke(tmp_path, monkeypatch):
    path = tmp_path / "manifest.json"
    replace_file(path, b"old")
    seen = []
    real = os.replace

    def noticed(old, new):
        seen.append((path.read_bytes(), old.read_bytes()))
        real(old, new)

    monkeypatch.setattr(files.os, "replace", noticed)
    replace_file(path, b"new")
    assert seen == [(b"old", b"new")] and path.read_bytes() == b"new" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("write", ["file", "replace", "named", "named over another"])
def test_the_bytes_are_permanent_before_the_name_and_the_name_before_it_returns(tmp_path, monkeypatch, write):
    path, calls = tmp_path / "file", []
    real = {name: getattr(os, name) for name in ("fsync", "replace", "link")}

    def noticed(name):
        def call(*arguments):
            is_folder = name == "fsync" and stat.S_ISDIR(os.fstat(arguments[0]).st_mode)
            nbytes = os.fstat(arguments[0]).st_size if name == "fsync" and not is_folder else 0
            calls.append("folder" if is_folder else f"fsync {nbytes}" if name == "fsync" else "name")
            return real[name](*arguments)

        return call

    for name in real:
        monkeypatch.setattr(files.os, name, noticed(name))
    if write == "file":
        write_file(tmp_path, "server-0", ".bin", views(b"abc", b"de"))
    elif write == "replace":
        replace_file(path, b"abcde")
    else:
        write_named_file(path, views(b"abcde"), overwrite=write != "named")
    assert calls == ["fsync 5", "name", "folder"]


@pytest.mark.parametrize("write", ["file", "replace", "named"])
@pytest.mark.parametrize("call", ["fsync", "replace", "link", "open"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_no_unfinished_file_is_left_whatever_the_disk_refuses(tmp_path, monkeypatch, write, call, number):
    path = tmp_path / "file"
    if write == "replace":
        path.write_bytes(b"old")
    monkeypatch.setattr(files.os, call, refuse(number))
    failure = None
    try:
        if write == "file":
            write_file(tmp_path, "server-0", ".bin", views(b"new"))
        elif write == "replace":
            replace_file(path, b"new")
        else:
            write_named_file(path, views(b"new"), overwrite=False)
    except OSError as error:
        failure = error
    # A hard link that is refused is done without; the others are not needed everywhere.
    assert (failure is None) == (call == "link" or (call == "replace" and write == "named"))
    assert [one for one in tmp_path.iterdir() if one.suffix == ".part"] == []
    for one in tmp_path.iterdir():
        assert one.read_bytes() in (b"old", b"new")


def test_what_gives_the_bytes_may_fail_too(tmp_path):
    def parts():
        yield memoryview(b"some")
        raise CheckpointError("no more")

    with pytest.raises(CheckpointError, match="no more"):
        write_file(tmp_path, "server-0", ".bin", parts())
    assert list(tmp_path.iterdir()) == []


def test_of_parts_that_are_made_one_by_one_one_is_in_memory(tmp_path):
    nbytes = 1 << 20

    def parts():
        for _ in range(6):
            yield np.zeros(nbytes, np.uint8).data

    tracemalloc.start()
    try:
        write_file(tmp_path, "server-0", ".bin", parts())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1.5 * nbytes


def test_a_leftover_or_a_link_of_the_same_unfinished_name_is_not_written_through(tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / f"server-0.bin.{os.getpid()}.part").symlink_to(victim)
    record = write_file(tmp_path / "run", "server-0", ".bin", views(b"new"))
    assert victim.read_bytes() == b"precious" and (tmp_path / "run" / record.name).read_bytes() == b"new"
    assert len(list((tmp_path / "run").iterdir())) == 1


def test_a_file_system_without_second_names_still_keeps_what_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(files.os, "link", refuse(errno.EPERM))
    write_named_file(tmp_path / "out", views(b"one"), overwrite=False)
    with pytest.raises(FileExistsError):
        write_named_file(tmp_path / "out", views(b"two"), overwrite=False)
    assert (tmp_path / "out").read_bytes() == b"one" and len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_cannot_be_made_durable_is_an_error_unless_its_file_system_never_can(tmp_path, monkeypatch):
    monkeypatch.setattr(files.os, "fsync", refuse(errno.EIO))
    with pytest.raises(OSError):
        make_durable(tmp_path)
    monkeypatch.setattr(files.os, "fsync", refuse(errno.EINVAL))
    make_durable(tmp_path)


def test_a_file_that_is_missing_cut_or_changed_is_found(tmp_path):
    record = write_file(tmp_path, "server-0", ".bin", views(b"0123456789"))
    path = tmp_path / record.name
    for position in range(10):
        content = bytearray(b"0123456789")
        content[position] ^= 1
        path.write_bytes(content)
        require_present(tmp_path, record)
        for check in (require_intact, read_intact):
            with pytest.raises(CheckpointError, match="is damaged: its content does not have the checksum"):
                check(tmp_path, record)
    for content in (b"", b"012345678", b"0123456789a"):
        path.write_bytes(content)
        for check in (require_present, require_intact, read_intact):
            with pytest.raises(CheckpointError, match=f"has {len(content)} bytes where 10 were written"):
                check(tmp_path, record)
    path.unlink()
    with pytest.raises(CheckpointError, match="is not there .*must all see the folder of checkpoints under the same"):
        require_present(tmp_path, record)
    path.mkdir()
    with pytest.raises(CheckpointError, match="is not a regular file"):
        require_present(tmp_path, record)


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="is not a regular file"):
        require_intact(tmp_path, FileRecord("pipe", 0, hashlib.sha256().hexdigest()))


def test_a_file_that_may_not_be_read_is_a_sentence(tmp_path, monkeypatch):
    record = write_file(tmp_path, "server-0", ".bin", views(b"x"))
    monkeypatch.setattr(files.os, "open", refuse(errno.EACCES))
    with pytest.raises(CheckpointError, match="could not be read: Permission denied"):
        require_intact(tmp_path, record)


def test_an_error_of_the_disk_says_what_could_not_be_done():
    with (
        pytest.raises(CheckpointError, match="^the folder could not be used: No space left on device$"),
        explained("the folder could not be used"),
    ):
        refuse(errno.ENOSPC)()
