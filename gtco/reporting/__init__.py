"""What a compilation did, for people and for programs.

`report` sums it up, `fallbacks` says what runs with ATen and why, `build` holds all that is known
of one build and `page` shows it, and `dump` writes every stage of one compilation as files.
"""
