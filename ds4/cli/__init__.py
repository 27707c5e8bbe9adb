"""Entry points: one flag parser per program, each parsed once into one frozen config dataclass."""
