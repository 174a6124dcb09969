"""fusedce in other people's trainers. Importing this package imports none of them."""
