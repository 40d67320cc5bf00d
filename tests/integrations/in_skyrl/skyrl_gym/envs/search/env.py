"""Its configuration."""

import dataclasses


@dataclasses.dataclass
class SearchEnvConfig:
    pass
