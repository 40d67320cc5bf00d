"""SWIFT, its TRL and stand-ins come first on the path (../test_swift.py); here are a model and a data set."""

import gc
import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[2]))

import swift_cases


def pytest_collection_finish():
    """What is here is here for good: trainers collect garbage at every turn, and need not look through it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """A model with its tokenizer, and rows with an answer, a worse one, and a word on the first."""
    folder = tmp_path_factory.mktemp("files")
    swift_cases.save(folder / "model")
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"what is {7 * i} plus {i + 1}?"},
                {"role": "assistant", "content": f"it is {8 * i + 1}."},
            ],
            "rejected_response": "no idea, sorry.",
            "label": i % 2 == 0,
        }
        for i in range(16)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder
