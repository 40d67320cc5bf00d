"""Its configuration."""

import dataclasses


@dataclasses.dataclass
class Text2SQLEnvConfig:
    pass
