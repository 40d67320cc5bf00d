import sys

from rlkernel.bench.cli import main

sys.exit(main())
