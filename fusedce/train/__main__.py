"""`torchrun … -m fusedce.train`: what `fusedce train` runs, in every process."""

import sys

from fusedce.train.run import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
