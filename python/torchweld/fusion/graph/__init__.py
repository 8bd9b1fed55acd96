"""Recognition by proof, on the graphs that Dynamo captures."""
