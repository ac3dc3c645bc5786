"""The intermediate representation: graphs, their operators, and what they mean.

`spec` says what a value is, `ops` is the table of operators, `graph` puts them together, `views`
are strided readings of stored tensors, and `interpreter` runs any graph in torch: the oracle.
"""
