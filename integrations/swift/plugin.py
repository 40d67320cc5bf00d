"""What ``swift rlhf --external_plugins`` takes the path of, and imports in each of its processes.

    swift rlhf --external_plugins $(python -m rlkernel.integrations.swift --plugin) --rlhf_type grpo ...

``SWIFT_RLKERNEL`` names the parts, or everything is replaced.
"""

from rlkernel.integrations.swift import switch
from rlkernel.integrations.swift.install import register

switch.ask()
register()
