"""What ms-swift imports and a training of what is on the disk does not use: modules to write down."""

import textwrap
from pathlib import Path

# without a hub that is asked, a server, or a multimodal dataset
STAND_INS = {
    "aiohttp.py": "ClientConnectorError = OSError\n",
    "dacite.py": "def from_dict(data_class, data, config=None):\n    return data_class(**data)\n",
    "json_repair.py": "from json import loads\n",
    "msgspec.py": "from dataclasses import field\n",
    "modelscope/__init__.py": """
        snapshot_download = None

        def check_local_model_is_latest(*_, **__):
            pass
    """,
    "modelscope/hub/__init__.py": "",
    "modelscope/hub/api.py": """
        class HubApi:
            pass

        class ModelScopeConfig:
            pass
    """,
    "modelscope/hub/constants.py": "",
    "modelscope/hub/file_download.py": "model_file_download = None\n",
    "modelscope/hub/utils/__init__.py": "",
    "modelscope/hub/utils/utils.py": """
        import tempfile

        def get_cache_dir(*_):
            return tempfile.gettempdir()
    """,
    "modelscope/utils/__init__.py": "",
    "modelscope/utils/config_ds.py": "MS_CACHE_HOME = ''\n",
    "modelscope/utils/logger.py": """
        import logging

        def get_logger(*_):
            logger = logging.getLogger("modelscope")
            if not logger.handlers:
                logger.addHandler(logging.StreamHandler())
            return logger
    """,
}


def write(folder: Path) -> Path:
    """The same folder, with the modules in it."""
    for name, text in STAND_INS.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return folder
