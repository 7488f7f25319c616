"""From live state to durable files: snapshot, shard file, storage, writer."""
