// Renders the Markdown of models as elements: never as raw HTML, and without external resources.
import { marked, type Token, type Tokens } from "marked";
import type { ComponentChildren } from "preact";
import { useMemo } from "preact/hooks";
import { CopyButton } from "./parts/controls";

const ENTITIES: Record<string, string> = { amp: "&", lt: "<", gt: ">", quot: '"', "#39": "'", nbsp: "\u00a0" };
const MAX_CHARS = 200_000;

export function Markdown({ text }: { text: string }) {
  const tokens = useMemo(() => (text.length > MAX_CHARS ? undefined : marked.lexer(text, { gfm: true })), [text]);
  if (!tokens) return <pre class="plain">{text}</pre>;
  return <div class="markdown">{blocks(tokens)}</div>;
}

function blocks(tokens: Token[]): ComponentChildren {
  return tokens.map(block);
}

function block(token: Token): ComponentChildren {
  switch (token.type) {
    case "space":
    case "def":
      return null;
    case "heading": {
      const { depth } = token as Tokens.Heading;
      const Tag = `h${Math.min(6, depth + 2)}` as "h3";
      return <Tag>{inline(token.tokens)}</Tag>;
    }
    case "paragraph":
      return <p>{inline(token.tokens)}</p>;
    case "code":
      return <Code text={token.text} lang={(token as Tokens.Code).lang} />;
    case "blockquote":
      return <blockquote>{blocks(token.tokens ?? [])}</blockquote>;
    case "hr":
      return <hr />;
    case "list": {
      const list = token as Tokens.List;
      const items = list.items.map((item) => <li>{item.task ? [item.checked ? "☑ " : "☐ ", blocks(item.tokens)] : blocks(item.tokens)}</li>);
      return list.ordered ? <ol start={Number(list.start) || 1}>{items}</ol> : <ul>{items}</ul>;
    }
    case "table": {
      const table = token as Tokens.Table;
      return (
        <div class="table-scroll" tabIndex={0} role="region" aria-label="Table">
          <table>
            <thead>
              <tr>{table.header.map((cell) => <th scope="col">{inline(cell.tokens)}</th>)}</tr>
            </thead>
            <tbody>
              {table.rows.map((row) => (
                <tr>{row.map((cell) => <td>{inline(cell.tokens)}</td>)}</tr>
              ))}
            </tbody>
          </table>
        </div>
      );
    }
    case "text":
      return token.tokens ? inline(token.tokens) : decoded(token.text);
    default:
      return <p>{token.raw}</p>; // HTML is shown as it is written
  }
}

function inline(tokens: Token[] | undefined): ComponentChildren {
  return (tokens ?? []).map((token) => {
    switch (token.type) {
      case "strong":
        return <strong>{inline(token.tokens)}</strong>;
      case "em":
        return <em>{inline(token.tokens)}</em>;
      case "del":
        return <del>{inline(token.tokens)}</del>;
      case "codespan":
        return <code>{token.text}</code>;
      case "br":
        return <br />;
      case "link":
        return anchor((token as Tokens.Link).href, inline(token.tokens));
      case "image":
        return anchor((token as Tokens.Image).href, `picture: ${token.text || token.href}`);
      case "escape":
        return token.text;
      case "text":
        return token.tokens ? inline(token.tokens) : decoded(token.text);
      default:
        return token.raw;
    }
  });
}

function anchor(href: string, label: ComponentChildren): ComponentChildren {
  if (!/^(https?:|mailto:)/i.test(href)) return <span>{label}</span>;
  return (
    <a href={href} target="_blank" rel="noopener noreferrer nofollow">
      {label}
    </a>
  );
}

function decoded(text: string): string {
  return text.replace(/&(amp|lt|gt|quot|#39|nbsp);/g, (_, name: string) => ENTITIES[name]!);
}

function Code({ text, lang }: { text: string; lang?: string }) {
  return (
    <div class="code">
      <div class="code-head">
        <span>{(lang ?? "").slice(0, 30) || "text"}</span>
        <CopyButton text={text} label="Copy code" />
      </div>
      <pre tabIndex={0}>
        <code>{painted(text)}</code>
      </pre>
    </div>
  );
}

const PARTS =
  /(\/\/[^\n]*|#[^\n]*|\/\*[\s\S]*?\*\/)|("(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|`(?:\\.|[^`\\])*`)|\b(\d+(?:\.\d+)?)\b|\b(and|as|async|await|break|case|class|const|continue|def|do|elif|else|enum|except|export|false|False|finally|fn|for|from|func|function|if|impl|import|in|interface|is|let|match|mut|new|nil|None|not|null|or|package|pass|pub|raise|return|self|static|struct|switch|this|throw|true|True|try|type|use|var|void|while|with|yield)\b/g;

/** Comments, strings, numbers and keywords that most languages share. */
function painted(text: string): ComponentChildren {
  if (text.length > 20_000) return text;
  const found: ComponentChildren[] = [];
  let at = 0;
  for (const match of text.matchAll(PARTS)) {
    const kind = match[1] ? "c" : match[2] ? "s" : match[3] ? "n" : "k";
    found.push(text.slice(at, match.index), <span class={`hl-${kind}`}>{match[0]}</span>);
    at = match.index + match[0].length;
  }
  found.push(text.slice(at));
  return found;
}
