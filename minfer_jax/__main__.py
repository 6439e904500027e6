"""`python -m minfer_jax`."""

from minfer_jax.cli import main

if __name__ == "__main__":
    main()
