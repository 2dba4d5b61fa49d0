"""The task of a JobSpec: data set, model and the sizes that follow from them."""
