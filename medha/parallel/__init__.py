"""One model over many ranks: tensor parallelism, stream pipeline parallelism, and the control stream from rank 0."""
