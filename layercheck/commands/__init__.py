"""The commands of `layercheck`: each takes a store and its options and returns an `Answer`; none prints."""
