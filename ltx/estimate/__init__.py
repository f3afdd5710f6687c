"""What a step sends and what that takes, known from shapes alone, before anything runs."""
