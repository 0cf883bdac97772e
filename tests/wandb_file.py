"""Reads what W&B keeps of an offline run: records of protobuf in the format of LevelDB's log."""

import json
import struct
import time
from pathlib import Path

BLOCK = 32768


def records(path: Path) -> list:
    """The records of a finished run's ``.wandb`` file, in order.

    W&B's own process writes it, and on a busy machine is not through when the run says that it has finished.
    """
    end = time.monotonic() + 60
    while True:
        found = list(_records(path.read_bytes()))
        kinds = [record.WhichOneof("record_type") for record in found]
        if "exit" in kinds:
            return found
        assert time.monotonic() < end, f"{path} has no end, only {kinds}"
        time.sleep(0.1)


def _records(data: bytes):
    from wandb.proto.wandb_internal_pb2 import Record

    place, whole = 7, b""
    assert data[:4] in (b"", b":W&B")
    while place + 7 <= len(data):
        if BLOCK - place % BLOCK < 7:  # no header fits into the rest of a block
            place += BLOCK - place % BLOCK
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + 7])
        if place + 7 + size > len(data):
            return  # still being written
        whole += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def history(folder: Path) -> list[dict]:
    """The rows of ``run.log`` of an offline run's folder."""
    (path,) = folder.glob("*.wandb")
    return [
        {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records(path)
        if record.WhichOneof("record_type") == "history"
    ]
