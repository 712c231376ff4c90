"""The study's exhibits in virtual time, and what this router does beyond them."""
