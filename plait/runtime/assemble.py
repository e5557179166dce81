def assemble(*a): raise NotImplementedError
