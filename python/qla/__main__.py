import sys

from qla.cli import main

sys.exit(main())
